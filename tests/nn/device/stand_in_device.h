// A device without hardware: streams are threads that do what is put into them later, events are real. It
// shows on any machine whether code waits for what it should, and for nothing else. With stand_in_memory.cpp
// linked in it has tensors, too; every operator on them is LibTorch's of the CPU on copies and done when it
// returns, whatever the stream.
#pragma once

#include <functional>

#include "twobp/nn/device/device.h"

namespace twobp::test {

// One of `kStandInDevices`, of LibTorch's type PrivateUse1.
constexpr int kStandInDevices = 64;
Device stand_in_device(int index);

// Between the two, the streams that are recorded: the current one, and those that wait for an event of them.
// As for CUDA it is an error if one of them waits for anything else, or if in the end one has not been waited
// for.
void begin_recording();
void end_recording();
// How often what was recorded has been put in.
int replays();

// The work is put into the stream, as a kernel would be.
void put(const DeviceStream& stream, std::function<void()> work);
// The same by the stream's native handle, as libraries such as NCCL get it.
void put(void* native_stream, std::function<void()> work);

}  // namespace twobp::test
