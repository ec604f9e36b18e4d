// A communicator of NCCL, and the stream at this rank's end. Calls run in their order, in this stream.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "twobp/nn/device/device.h"
#include "twobp/transport/nccl/nccl_api.h"
#include "twobp/transport/transport.h"

namespace twobp {

// The time between two polls of NCCL, after the first polls without a pause.
inline constexpr auto kNcclPause = std::chrono::microseconds(50);
inline constexpr double kNcclSpinSeconds = 200e-6;

class NcclCommunicator {
 public:
  // Where this rank is in the communicator. A kernel of it occupies at most `most_ctas` multiprocessors, also while it
  // waits for a peer; NCCL_MAX_CTAS overrides that.
  struct Place {
    int ranks;
    int rank;
    int most_ctas;
  };

  // Ends the communicator: by an abort, unless it is finalized.
  virtual ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // Waits until all ends are connected and first numbers have travelled. NCCL makes its buffers and connections at the
  // first call of a kind, which blocks the calling thread until then. All ends of all communicators must connect in the
  // same order. The number lies on `memory`. Calls `look_around` while it waits. Throws Error after `deadline`, seconds
  // of awake_seconds(), and whatever `look_around` throws.
  void connect(at::Device memory, double deadline, const std::function<void()>& look_around);

  const DeviceStream& stream() const { return stream_; }

  // Says that nothing more comes. All ends of all communicators say so before anybody waits for one of them.
  void finalize();
  // Whether the others have said so too, and the communicator can be destroyed without waiting.
  bool finalized();

  // Forgets finished calls. Returns the number of the remaining ones.
  size_t under_way();
  // A description of a problem, or nothing: an error that NCCL reports, or a call that has taken longer than `timeout`.
  // From any thread, also while another one is in a launch that does not return. Allocates and frees no tensor.
  std::string trouble(double timeout);
  // From any thread: makes waiting calls throw Aborted. Afterwards nothing can be called.
  void interrupt() { aborted_ = true; }
  // Also ends the calls under way, including kernels that wait for a peer. No thread may be in a call of this object,
  // except in trouble(), and in one that NCCL does not return from.
  void abort();

 protected:
  // Begins to connect. The other ends do the same with the same id. Nothing else uses `stream`. `name`, such as "NCCL
  // from rank 0 to rank 1", is for messages.
  NcclCommunicator(const NcclApi& api, const DeviceStream& stream, const NcclUniqueId& id, const Place& place,
                   std::string name);

  // Launches a first call of each kind, with a number on `memory`.
  virtual void first_calls(at::Device memory, double deadline) = 0;

  // Throws Aborted after an abort.
  void check_usable() const;
  // Throws Error unless the NCCL call that returned `result` has succeeded. Waits for a call that is still under way.
  // Throws Aborted if an abort ended it.
  void check(int result, const char* what, double deadline);
  // Notes that calls were launched since `begin`. They keep `values` until they are done, when the event passes. `tag`
  // is for messages.
  DeviceEvent launched(Values values, double begin, const Tag& tag);

  static constexpr double kCallSeconds = 30;  // for a call that only launches work

  const NcclApi& api() const { return api_; }
  NcclComm comm() const { return comm_; }

 private:
  struct Call {
    Values values;
    DeviceEvent done;
    double begin = 0;
    Tag tag;
  };

  const NcclApi& api_;
  std::string name_;
  DeviceStream stream_;
  NcclComm comm_ = nullptr;
  bool finalized_ = false;
  std::atomic<bool> aborted_{false};
  std::atomic<bool> freed_{false};     // comm_ was freed by abort()
  std::function<void()> look_around_;  // called while connecting
  std::mutex state_;                   // guards calls_ and the end of comm_; nobody launches or waits with it
  std::deque<Call> calls_;
};

// Some ranks that sum tensors together: a communicator of all of them.

// For the kernels of a group. More are faster between the GPUs of a machine, but F and I lack the multiprocessors, also
// while a kernel waits for a slower replica. Not measured.
inline constexpr int kNcclGroupCtas = 8;

class NcclGroup : public NcclCommunicator {
 public:
  // `members`: the ranks, in their order in the group. `place`: this rank's in it.
  NcclGroup(const NcclApi& api, const DeviceStream& stream, const NcclUniqueId& id, const std::vector<int>& members,
            int place);

  // As those of GroupSums. `ready`: passes when the device has made the tensors. `seconds`: the most that NCCL may take
  // to launch them.
  DeviceEvent all_reduce(const at::Tensor& tensor, const DeviceEvent& ready, double seconds = kCallSeconds);
  DeviceEvent reduce(const std::vector<at::Tensor>& tensors, const std::vector<int>& owners, const DeviceEvent& ready,
                     double seconds = kCallSeconds);
  DeviceEvent broadcast(const std::vector<at::Tensor>& tensors, const std::vector<int>& roots, const DeviceEvent& ready,
                        double seconds = kCallSeconds);

 private:
  void first_calls(at::Device memory, double deadline) override;
  // `call(i, data, stream)` is the NCCL call for tensor i.
  DeviceEvent launch(const std::vector<at::Tensor>& tensors, const DeviceEvent& ready, const char* what,
                     MessageKind kind, double seconds,
                     const std::function<int(size_t i, void* data, void* stream)>& call);
};

}  // namespace twobp
