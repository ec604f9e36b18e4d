// Streams that nobody else has. LibTorch hands out its 32 streams of a priority in turn, so that the 33rd is
// the first again. A transfer that waits for its peer would then hold up computations.
#pragma once

#include <c10/core/Stream.h>

namespace twobp {

// The stream lives until the program ends. For a kind of device without a maker, it is one of LibTorch's.
c10::Stream make_own_stream(c10::Device device, bool high_priority);

// Registers how streams of a kind of device are made. That of LibTorch's CUDA is built in.
using StreamMaker = c10::Stream (*)(c10::Device device, bool high_priority);
void make_streams_by(c10::DeviceType type, StreamMaker maker);

// Never called in a program without CUDA.
c10::Stream make_cuda_stream(c10::Device device, bool high_priority);

}  // namespace twobp
