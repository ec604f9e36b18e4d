// A device without hardware. Its streams are threads that run launched work later, and its events are real.
// On any machine, it shows whether code waits for the right events and for no others. Together with
// stand_in_memory.cpp it also has tensors. Every operator on them is LibTorch's CPU operator on copies, and
// it is done when it returns, in any stream.
#pragma once

#include <functional>

#include "twobp/nn/device/device.h"

namespace twobp::test {

// One of `kStandInDevices`, of LibTorch's type PrivateUse1.
constexpr int kStandInDevices = 64;
Device stand_in_device(int index);

// Between these two calls, the current stream is recorded, and so is every stream that waits for an event of
// a recorded stream. As in CUDA, it is an error if one of them waits for any other event. It is also an error
// if at the end nothing has waited for one of them.
void begin_recording();
void end_recording();
// The number of launches of recorded work.
int replays();

// Launches the work in the stream, as for a kernel.
void put(const DeviceStream& stream, std::function<void()> work);
// The same by the stream's native handle, which libraries such as NCCL receive.
void put(void* native_stream, std::function<void()> work);

}  // namespace twobp::test
