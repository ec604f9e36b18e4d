// One direction between two ranks: a communicator of the two and a stream, at the sender's or at the
// receiver's end. What is put in at one end comes out at the other in that order, by NCCL's rules and by the
// stream's.
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

// Between two looks at what NCCL has done.
inline constexpr auto kNcclPause = std::chrono::microseconds(50);

class NcclLink {
 public:
  // Begins to connect; the other end does the same with the same id. `stream` is used by nobody else; `name`
  // is for messages.
  NcclLink(const NcclApi& api, const Device& device, const DeviceStream& stream, const NcclUniqueId& id,
           bool sender, std::string name);
  // Ends the communicator without waiting for the peer unless nothing is under way.
  ~NcclLink();
  NcclLink(const NcclLink&) = delete;
  NcclLink& operator=(const NcclLink&) = delete;

  // Waits until both ends are there and a first byte has crossed: NCCL makes its buffers and connections at
  // the first message, which until then blocks the thread that begins it. All ends of all links must do so
  // in one order. The byte lies on `memory`. Throws Error after `deadline`, seconds of awake_seconds(), and
  // whatever `look_around` throws, which is called meanwhile.
  void connect(at::Device memory, double deadline, const std::function<void()>& look_around);

  const DeviceStream& stream() const { return stream_; }
  // Puts the tensors' memory into the stream, to be sent once `ready` has passed. They are kept until then.
  void send(Values values, const DeviceEvent& ready, const Tag& tag);
  // The same for memory to be written, which was allocated for stream(); the event is when it has been.
  DeviceEvent receive(const Values& values, const Tag& tag);

  // Forgets transfers that are done; how many are left.
  size_t under_way();
  // What is wrong, or nothing: an error that NCCL reports, or a transfer that has taken longer than
  // `timeout`.
  std::string trouble(double timeout);
  // From any thread: has whoever waits in a call of this link leave it, by Aborted. Nothing can be sent or
  // received afterwards.
  void interrupt() { aborted_ = true; }
  // The same, and ends what is under way, kernels that wait for the peer included. Nobody may be in a call of
  // this link but one that NCCL does not return from.
  void abort();

 private:
  struct Transfer {
    Values values;  // of a send: kept alive
    DeviceEvent done;
    double begin = 0;
    Tag tag;
  };

  // Throws Error unless the call of NCCL that returned this has succeeded; waits for it where it is under
  // way. Aborted if that is what ends it.
  void check(int result, const char* what, double deadline);
  void put(const at::Tensor& tensor, double deadline);

  const NcclApi& api_;
  Device device_;
  bool sender_;
  std::string name_;
  DeviceStream stream_;
  NcclComm comm_ = nullptr;
  std::atomic<bool> aborted_{false};
  std::atomic<bool> freed_{false};     // comm_, by abort()
  std::function<void()> look_around_;  // while it connects
  std::deque<Transfer> transfers_;
};

}  // namespace twobp
