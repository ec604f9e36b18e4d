// A device without hardware, as hard on a program as a GPU may be. Its operators are put into streams and run late:
// when a host thread waits for or asks about the device, in an order drawn at random from those that streams and events
// allow. Memory that the host frees is overwritten as soon as the stream that it was allocated in may reuse it. So a
// wait that is missing between streams, and memory that is freed too early, give wrong bits.
//
// Environment variables: TWOBP_STAND_IN_SEED draws other orders, TWOBP_STAND_IN_DEVICES is the number of devices (64),
// and TWOBP_STAND_IN_MODEL is their model. TWOBP_STAND_IN_TAKEN is one that cannot be opened, because another process
// computes on it alone. With TWOBP_STAND_IN_LOADS, operators are loaded on first use, as CUDA does unless
// CUDA_MODULE_LOADING is EAGER. That waits for everything on a GPU, so it is an error during a transfer, whose peer may
// do the same. TWOBP_STAND_IN_WITHOUT_META: shapes of results come from computations with zeros alone.
//
//   stand_in_queues.cpp    streams, events, recordings: what may run, and in which order
//   stand_in_device.cpp    the same as LibTorch's backend
//   stand_in_memory.cpp    memory, by the rules of LibTorch's allocator for CUDA
//   stand_in_operators.cpp operators: LibTorch's for CPUs, put into the current stream
//   stand_in_graph.cpp     graphs of recorded work
#pragma once

#include <functional>

#include "twobp/nn/device/device.h"

namespace twobp::test {

// One of `kStandInDevices`, of LibTorch's type PrivateUse1.
constexpr int kStandInDevices = 64;
Device stand_in_device(int index);

// Counts since the program began. `operators_run`: operators that were put into streams. `replays`: launches of
// recorded work. `host_reads`: times that the host waited for numbers of a device. `blocking_copies`: times that it
// copied from memory that is not pinned, and waited for the stream. `timed_events`: events with time that were made.
// `allocated`: bytes of blocks.
int operators_run();
int replays();
int host_reads();
int blocking_copies();
int timed_events();
int64_t allocated();

// Puts work into the stream, as for a kernel.
void put(const DeviceStream& stream, std::function<void()> work);
// The stream goes on when `ready` is true. It is asked often, from any thread, and must not wait.
void hold(const DeviceStream& stream, std::function<bool()> ready);
// The same by the stream's native handle, which libraries such as NCCL receive.
void put(void* native_stream, std::function<void()> work);
void hold(void* native_stream, std::function<bool()> ready);

// Reports a transfer that occupies a stream between the two calls, where it waits for a peer.
void transfer_begins();
void transfer_ends();
// The number of transfers that are in streams now.
int transfers();

// Runs all work that can run now, of all streams.
void let_run();

// The address at which the host, and so a library's kernel, reaches the memory at an address of the device. Other
// addresses are returned as they are.
void* reachable(const void* data);

}  // namespace twobp::test
