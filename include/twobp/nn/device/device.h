// Selects the device of a rank and orders its work, with streams and events. This uses LibTorch's device-generic
// interface, so building it needs neither CUDA's headers nor its libraries. On a CPU, where a call returns when its
// work is done, all operations are empty. Copies of an object refer to the same device, stream or event.
//
// A rank's work on a GPU runs in these streams. They wait for each other only through events:
//   compute   F, I and W, in the order in which they are launched
//   copies    transfers from other GPUs of this process, apart for computations and for sums
//   sums      sums of gradients over replicas: F, I and W do not wait for them
// All but `compute` have high priority.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include "twobp/nn/values.h"

namespace twobp {

class GpuParts;

// A point in a stream's work. A default-constructed event has already passed.
class DeviceEvent {
 public:
  // Whether all work before the event is done. Never blocks.
  bool passed() const { return !event_ || event_->query(); }
  void wait_on_host() const {
    if (event_) event_->synchronize();
  }
  // The time between the events on the device's clock. Both events must have passed. Both must have been recorded with
  // time, on the same device.
  double seconds_since(const DeviceEvent& earlier) const { return earlier.event_->elapsedTime(*event_) / 1e3; }

 private:
  friend class DeviceStream;
  std::shared_ptr<c10::Event> event_;
};

// A queue of work that runs in order. A default-constructed stream is that of a CPU.
class DeviceStream {
 public:
  DeviceStream() = default;
  explicit DeviceStream(c10::Stream stream) : stream_(stream) {}

  explicit operator bool() const { return stream_.has_value(); }
  const c10::Stream& operator*() const { return *stream_; }

  // Records an event after all work that has been launched so far.
  DeviceEvent record() const { return record(c10::EventFlag::PYTORCH_DEFAULT); }
  // As record(), and the event also records the time (see DeviceEvent::seconds_since).
  DeviceEvent record_with_time() const { return record(c10::EventFlag::BACKEND_DEFAULT); }
  // As record_with_time(), but records `event` again in place of a new event. `event` must come from
  // record_with_time(), and no code may still need its old point.
  void record_again(DeviceEvent& event) const { event.event_->record(*stream_); }
  // Work that is launched from now on begins after `event`. The calling thread does not wait.
  void wait(const DeviceEvent& event) const;
  // Call this if the stream reads or writes a tensor that may have been allocated for another stream. The tensor's
  // memory is then reused only after the work that was launched before the tensor was freed.
  void uses(const at::Tensor& tensor) const;
  // Whether all launched work is done. Never blocks.
  bool idle() const { return !stream_ || stream_->query(); }
  // Blocks the calling thread until all launched work is done.
  void wait_on_host() const {
    if (stream_) stream_->synchronize();
  }
  // A cudaStream_t. Null for a CPU.
  void* native() const { return stream_ ? stream_->native_handle() : nullptr; }

 private:
  DeviceEvent record(c10::EventFlag flag) const;

  std::optional<c10::Stream> stream_;
};

// While this object lives, the thread's computations and allocations use the stream.
class OnStream {
 public:
  explicit OnStream(const DeviceStream& stream) {
    if (stream) guard_.emplace(*stream);
  }

 private:
  std::optional<c10::StreamGuard> guard_;
};

class Device {
 public:
  Device() = default;  // the CPU

  // `type` is "cpu", "cuda" or another device type of LibTorch. `index` selects one of several GPUs. Throws Error if
  // the device does not exist.
  static Device open(const std::string& type, int index);
  // `type` is any device type for which LibTorch has streams.
  static Device open(at::DeviceType type, int index);

  // How many devices of this type there are, without opening one. Throws Error as open().
  static int count(const std::string& type);

  // Opens one device for each rank of this process. With fewer GPUs than ranks, the ranks take GPUs in turn and several
  // share one. Each then has its own streams and, with `in_parts`, its own multiprocessors (GpuParts). The result is
  // empty for the CPU.
  static std::vector<Device> open_for(const std::string& type, int ranks, bool in_parts = false);

  at::Device where() const { return where_; }
  // Whether calls return before their work is done.
  bool asynchronous() const { return static_cast<bool>(compute_); }
  const DeviceStream& compute() const { return compute_; }
  const DeviceStream& sums() const { return sums_; }
  // The stream in which the calling thread's work on this device is launched (OnStream).
  DeviceStream current() const;
  // Makes an extra stream for a special purpose, which no other code gets.
  DeviceStream make_stream(bool high_priority) const;

  // Makes what libraries keep for the calling thread and the compute stream: cuBLAS has a handle and a workspace of 32
  // MiB, which would otherwise be booked on the layer that comes first.
  void prepare_libraries() const;

  // Makes tensors of another GPU of this process available to `current()`. A stream for copies copies them from peer to
  // peer once `ready`, an event recorded on the other GPU, has passed. The caller does not wait. Tensors that are
  // already on this device, or on the host, are returned unchanged, and `current()` waits for `ready`.
  Values fetch(Values values, const DeviceEvent& ready) const;

 private:
  // Makes new streams on part `part` of the GPU.
  void move_to_part(std::shared_ptr<GpuParts> parts, int part);
  // Streams of transfers for one purpose: a sum that waits for another replica holds no activations up.
  struct Copies {
    explicit Copies(DeviceStream here) : here(std::move(here)) {}
    DeviceStream here;
    std::mutex mutex;
    std::vector<std::pair<at::Device, DeviceStream>> sources;  // on the other GPUs, which run copies from them

    DeviceStream from(at::Device source);
  };

  at::Device where_ = at::kCPU;
  std::shared_ptr<GpuParts> parts_;  // the parts of the shared GPU; outlives the streams
  DeviceStream compute_, sums_;
  std::shared_ptr<Copies> to_compute_, to_sum_;
};

}  // namespace twobp
