// Where a rank computes, and in which order: streams and events on LibTorch's device-generic interface, so
// that nothing here needs CUDA's headers or libraries to be built. On a CPU, where a call returns when its
// work is done, all of it is empty. A copy of an object stands for the same device, stream or event.
//
// A rank's work on a GPU is in these streams; none of them waits for another but by an event:
//   compute   F and I, high priority
//   weights   W, low priority: the device itself runs it where `compute` leaves room
//   copies    tensors on their way from other GPUs of this process, high priority
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include "twobp/nn/device/gpu_parts.h"
#include "twobp/nn/values.h"

namespace twobp {

// A point in a stream's work. Default: one that has passed.
class DeviceEvent {
 public:
  // Whether the work before it is done. Never blocks.
  bool passed() const { return !event_ || event_->query(); }
  void wait_on_host() const {
    if (event_) event_->synchronize();
  }
  // On the device's clock. Both have passed and were recorded with their time, on one device.
  double seconds_since(const DeviceEvent& earlier) const {
    return earlier.event_->elapsedTime(*event_) / 1e3;
  }

 private:
  friend class DeviceStream;
  std::shared_ptr<const c10::Event> event_;
};

// Work in order. Default: that of a CPU.
class DeviceStream {
 public:
  DeviceStream() = default;
  explicit DeviceStream(c10::Stream stream) : stream_(stream) {}

  explicit operator bool() const { return stream_.has_value(); }
  const c10::Stream& operator*() const { return *stream_; }

  // The point behind all that has been put in.
  DeviceEvent record() const { return record(c10::EventFlag::PYTORCH_DEFAULT); }
  // The same, and when it passes: see DeviceEvent::seconds_since.
  DeviceEvent record_with_time() const { return record(c10::EventFlag::BACKEND_DEFAULT); }
  // What is put in from now on begins after `event`. The calling thread does not wait.
  void wait(const DeviceEvent& event) const;
  // The tensor is read or written here, though it may have been allocated for another stream: its memory is
  // given to others only after what has been put in by the time it is freed.
  void uses(const at::Tensor& tensor) const;
  // Whether all is done; never blocks.
  bool idle() const { return !stream_ || stream_->query(); }
  // The calling thread waits for all of it.
  void wait_on_host() const {
    if (stream_) stream_->synchronize();
  }
  // cudaStream_t; null of a CPU.
  void* native() const { return stream_ ? stream_->native_handle() : nullptr; }

 private:
  DeviceEvent record(c10::EventFlag flag) const;

  std::optional<c10::Stream> stream_;
};

// What the thread computes and allocates while this lives is put into the stream.
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

  // "cpu", "cuda" or what else LibTorch has a name for; of several GPUs, the one with this number. Throws
  // Error where there is none.
  static Device open(const std::string& type, int index);
  // Any kind that LibTorch has streams for.
  static Device open(at::DeviceType type, int index);

  // One for each rank of this process, in turn where there are fewer than ranks: several then share one, each
  // with streams of its own and, if `in_parts`, multiprocessors of its own (GpuParts). Empty: the CPU.
  static std::vector<Device> open_for(const std::string& type, int ranks, bool in_parts = false);

  at::Device where() const { return where_; }
  // Whether calls return before their work is done.
  bool asynchronous() const { return static_cast<bool>(compute_); }
  const DeviceStream& compute() const { return compute_; }
  const DeviceStream& weights() const { return weights_; }
  // One more, for a purpose of its own.
  DeviceStream make_stream(bool high_priority) const;

  // The tensors of another GPU of this process, for `compute`: copied from peer to peer on the stream
  // `copies` as soon as `ready`, which was recorded there, has passed. The caller does not wait. Tensors that
  // are here already, or on the host, come as they are; `compute` waits for `ready`.
  Values fetch(Values values, const DeviceEvent& ready) const;

 private:
  // Streams on part `part` of the GPU from now on.
  void move_to_part(std::shared_ptr<GpuParts> parts, int part);
  // The stream at the other GPU that a copy from it runs on.
  DeviceStream source_stream(at::Device source) const;

  struct Sources {
    std::mutex mutex;
    std::vector<std::pair<at::Device, DeviceStream>> streams;
  };

  at::Device where_ = at::kCPU;
  std::shared_ptr<GpuParts> parts_;  // of which this is one; outlives the streams
  DeviceStream compute_, weights_, copies_;
  std::shared_ptr<Sources> sources_;
};

}  // namespace twobp
