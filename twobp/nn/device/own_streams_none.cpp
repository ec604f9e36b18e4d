#include "twobp/core/check.h"
#include "twobp/nn/device/own_streams.h"

namespace twobp {

c10::Stream make_cuda_stream(c10::Device device, bool) {
  fail(device.str(), " has no streams in a program that was built with a LibTorch without CUDA");
}

}  // namespace twobp
