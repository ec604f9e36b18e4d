// The transport of one process over an MPI communicator. Private: other code uses mpi.h.
//
// A message is a head (message.h), which MPI sends immediately, and a transfer in chunks for each tensor that is too
// large for the head. A receiver takes heads as they arrive and posts the receives for their tensors at once, even
// before the rank asks for the message. So messages need no buffers of MPI, and move while the rank computes. An
// expected message has no head: its tensors' receives are posted before it is sent.
#pragma once

#include <cstddef>
#include <deque>
#include <list>
#include <memory>
#include <mpi.h>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/transport/message.h"
#include "twobp/transport/mpi/mpi.h"

namespace twobp {

// Open MPI sends and receives, tested together. Private to the MPI transport.

// Throws Error with MPI's text for `code` unless it is success.
void check_mpi(int code, const char* what);

// A message under way. The memory that its requests read and write must not move until all are done.
struct Transfer {
  virtual ~Transfer() = default;
  int open = 0;  // number of open requests
};

class MpiRequests {
 public:
  // `bytes` is the number of bytes that a receive must deliver, and -1 for a send.
  void add(MPI_Request request, Transfer& transfer, int bytes = -1);
  // Tests the requests and counts the finished ones off their transfers. Appends transfers without open requests to
  // `done`.
  void test(std::vector<Transfer*>& done);
  bool empty() const { return requests_.empty(); }

 private:
  struct About {
    Transfer* transfer;
    int bytes;
  };

  std::vector<MPI_Request> requests_;
  std::vector<About> about_;
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;
};

class MpiEndpoint : public Transport {
 public:
  // `communicator` belongs to this endpoint. `spins`: every process of this machine has a core of its own.
  MpiEndpoint(MPI_Comm communicator, const MpiOptions& options, bool spins);
  ~MpiEndpoint() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void isend(int to, const Tag& tag, Values values) override;
  bool expect(int from, const Tag& tag, const Forms& forms) override;
  void isend_expected(int to, const Tag& tag, Values values) override;
  bool try_receive(int from, const Tag& tag, Values& values) override;
  Values receive(int from, const Tag& tag, double timeout) override;
  void progress() override;
  std::optional<int> unsent_to() override;
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
    bool expected = false;  // it comes without a head
  };
  struct Head : Transfer {
    std::vector<std::byte> bytes;
  };
  // The messages of one rank, in the order in which it sent them.
  struct Peer {
    std::deque<std::unique_ptr<Head>> heads;
    std::list<std::unique_ptr<Incoming>> messages;
    int64_t sent = 0;  // number of messages sent to it
  };

  // Call these with mutex_ held.
  void poll();
  void take_heads();
  void open_heads(int from);
  void begin_receive(int from, Head& head);
  bool take(int from, const Tag& tag, Values& values);
  void send_head(Outgoing& out);
  void send_tensors(Outgoing& out, int mpi_tag);
  void receive_tensors(int from, Incoming& in, int mpi_tag);
  void throw_if_aborted() const;

  // Calls `done`, which polls, under the mutex until it returns true. Returns false after `timeout`.
  template <typename Done>
  bool wait(double timeout, Done&& done);

  MPI_Comm communicator_;
  MpiOptions options_;
  bool spins_;
  int rank_ = 0;
  int size_ = 0;
  int tags_ = 0;  // number of payload tags

  // One thread at a time uses MPI. abort() may be called from any thread.
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
