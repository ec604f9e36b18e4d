// One direction between two ranks: a communicator of the two ranks, and a stream at the sender's or at the
// receiver's end. By the rules of NCCL and of streams, transfers arrive in the order in which they were
// launched.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <string>

#include "twobp/nn/device/device.h"
#include "twobp/transport/nccl/nccl_api.h"
#include "twobp/transport/transport.h"

namespace twobp {

// The time between two polls of NCCL, after the first polls without a pause.
inline constexpr auto kNcclPause = std::chrono::microseconds(50);
inline constexpr double kNcclSpinSeconds = 200e-6;
// A link's kernel occupies at most this many multiprocessors, also while it waits for its peer. Left alone,
// NCCL may take 32 of an H100's 132, and a rank in the middle of a pipeline has four links. NCCL_MAX_CTAS
// overrides it.
inline constexpr int kNcclMostCtas = 2;

class NcclLink {
 public:
  // Begins to connect. The other end does the same with the same id. Nothing else uses `stream`. `name` is
  // for messages.
  NcclLink(const NcclApi& api, const Device& device, const DeviceStream& stream, const NcclUniqueId& id,
           bool sender, std::string name);
  // Ends the communicator: by an abort, unless it is finalized.
  ~NcclLink();
  NcclLink(const NcclLink&) = delete;
  NcclLink& operator=(const NcclLink&) = delete;

  // Waits until both ends are connected and a first byte has been sent. NCCL makes its buffers and
  // connections at the first message, which blocks the calling thread until then. All ends of all links must
  // connect in the same order. The byte lies on `memory`. Calls `look_around` while it waits. Throws Error
  // after `deadline`, seconds of awake_seconds(), and whatever `look_around` throws.
  void connect(at::Device memory, double deadline, const std::function<void()>& look_around);

  const DeviceStream& stream() const { return stream_; }
  // Launches the sending of the tensors' memory in the stream. The device must have made the tensors already.
  // The link keeps them until they are sent.
  void send(Values values, const Tag& tag);
  // The same for memory to receive into, which was allocated for stream(). The event passes when the memory
  // has been written.
  DeviceEvent receive(const Values& values, const Tag& tag);

  // Says that nothing more comes. Both ends of all links say so before anybody waits for one of them.
  void finalize();
  // Whether the peer has said so too, and the communicator can be destroyed without waiting.
  bool finalized();

  // Forgets finished transfers. Returns the number of the remaining ones.
  size_t under_way();
  // A description of a problem, or nothing: an error that NCCL reports, or a transfer that has taken longer
  // than `timeout`.
  std::string trouble(double timeout);
  // From any thread: makes waiting calls of this link throw Aborted. Afterwards nothing can be sent or
  // received.
  void interrupt() { aborted_ = true; }
  // Also ends the transfers under way, including kernels that wait for the peer. No thread may be in a call
  // of this link, except in one that NCCL does not return from.
  void abort();

 private:
  struct Transfer {
    Values values;  // of a send: keeps the tensors alive
    DeviceEvent done;
    double begin = 0;
    Tag tag;
  };

  // Throws Error unless the NCCL call that returned `result` has succeeded. Waits for a call that is still
  // under way. Throws Aborted if an abort ended it.
  void check(int result, const char* what, double deadline);
  void put(const at::Tensor& tensor, double deadline);

  const NcclApi& api_;
  Device device_;
  bool sender_;
  std::string name_;
  DeviceStream stream_;
  NcclComm comm_ = nullptr;
  bool finalized_ = false;
  std::atomic<bool> aborted_{false};
  std::atomic<bool> freed_{false};     // comm_ was freed by abort()
  std::function<void()> look_around_;  // called while connecting
  std::deque<Transfer> transfers_;
};

}  // namespace twobp
