// The transport of one process over an MPI communicator. Private: others see mpi.h.
//
// A message is a head (message.h), which MPI carries at once, and a transfer for each tensor that is too
// large for it, in chunks. A receiver takes heads as it meets them and posts the receives of what belongs to
// them, whether or not anybody has asked for the message: so it needs no buffers of MPI's own, and moves
// while the rank computes.
#pragma once

#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "twobp/transport/message.h"
#include "twobp/transport/mpi/mpi.h"
#include "twobp/transport/mpi/mpi_requests.h"

namespace twobp {

class MpiEndpoint : public Transport {
 public:
  // `communicator` is the endpoint's own. `spins`: every process of this machine has a core of its own.
  MpiEndpoint(MPI_Comm communicator, const MpiOptions& options, bool spins);
  ~MpiEndpoint() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void isend(int to, const Tag& tag, Values values) override;
  bool try_receive(int from, const Tag& tag, Values& values) override;
  Values receive(int from, const Tag& tag, double timeout) override;
  void progress() override;
  void flush(double timeout) override;
  void abort(const std::string& reason) override;
  bool aborted();

 private:
  struct Outgoing : Transfer {
    int to = 0;
    std::vector<std::byte> head;
    std::vector<at::Tensor> tensors;
  };
  struct Incoming : Transfer {
    IncomingMessage message;
    bool there = false;
  };
  struct Head : Transfer {
    std::vector<std::byte> bytes;
  };
  // What one rank has sent, in the order in which it sent it.
  struct Peer {
    std::deque<std::unique_ptr<Head>> heads;
    std::list<std::unique_ptr<Incoming>> messages;
    int64_t sent = 0;  // to it
  };

  // All under mutex_.
  void poll();
  void take_heads();
  void open_heads(int from);
  void begin_receive(int from, Head& head);
  bool take(int from, const Tag& tag, Values& values);
  void send_parts(Outgoing& out, int payload_tag);
  void throw_if_aborted() const;

  // Calls `done`, which polls, under the mutex until it returns true; false after `timeout`.
  template <typename Done>
  bool wait(double timeout, Done&& done);

  MPI_Comm communicator_;
  MpiOptions options_;
  bool spins_;
  bool device_memory_;
  int rank_ = 0;
  int size_ = 0;
  int tags_ = 0;  // of payloads

  // MPI is used by one thread at a time; abort comes from any.
  std::mutex mutex_;
  MpiRequests requests_;
  std::vector<Transfer*> done_;
  ReceiveMemory memory_;
  std::vector<Peer> peers_;
  std::list<std::unique_ptr<Outgoing>> outgoing_;
  bool aborted_ = false;
  std::string reason_;
};

}  // namespace twobp
