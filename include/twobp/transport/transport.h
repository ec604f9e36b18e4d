// The exchange of tensors between ranks. One Transport object belongs to one rank, and only its thread uses it, or its
// Companion in turn. Three exceptions: abort(); subgroups of one endpoint, which may have a thread each; and
// World::processes, over which a second thread may send. Sends never block. Each wait for a receive has a time-out.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "twobp/nn/values.h"

namespace twobp {

// The kind of a message. The comments give the meaning of `stage` and `micro_batch` in its tag if it differs from the
// names.
enum class MessageKind : uint8_t {
  kForward,       // the input of a stage
  kBackward,      // the output gradient of a stage
  kEvaluation,    // the input of a stage that is evaluated
  kTiedGradient,  // gradient of a weight that several stages use: the weight; the use
  kTiedWeight,    // a weight that several ranks of a process use is updated: the weight; 0
  kWeights,       // weights that a replica has updated: the index of the message; 0
  kClock,         // question or answer; the round
  kExperts,       // tokens for experts of another replica, or their results: the layer and exchange (turns.cpp)
  kOrder,         // the messages of a plan, as their sender lists them: 0; 0
  // Collective operations of all ranks: 0; the operation's number (collectives.h, transport/processes.h).
  kPart,
  kSum,
  kBroadcast,
  kGather,
  kEndOfWork,
  kVerdict,
  kNone,  // never sent
};

// Identifies a message.
struct Tag {
  int64_t step = 0;
  int stage = 0;  // the receiving stage
  int micro_batch = 0;
  MessageKind kind = MessageKind::kForward;
  uint8_t group = 0;  // set by Subgroup, because the same ranks may communicate in several roles

  bool operator==(const Tag&) const = default;
};

std::string to_string(const Tag& tag);

// Thrown from waits after abort(). Another rank failed, and its error is the one to report.
class Aborted : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What a tensor is, apart from its numbers. Its memory has no gaps.
struct Form {
  at::ScalarType type = at::kFloat;
  std::vector<int64_t> sizes, strides;

  bool operator==(const Form&) const = default;
};
using Forms = std::vector<Form>;

class GroupSums;

class Transport {
 public:
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Sends `values` to rank `to`. Sender and receiver may share memory afterwards, so neither may write to it.
  virtual void isend(int to, const Tag& tag, Values values) = 0;

  // Messages whose forms both ends know need no description: their tensors travel at once, into memory that waits for
  // them. The receiver says that it expects the message, and the sender that it is expected. The receiver lists what
  // one rank sends in the order in which it is sent, also messages with a description, without forms: NCCL knows
  // messages by their order alone, and over c10d one that does not come holds up those behind it. Returns whether the
  // memory is there, allocated now or by an earlier call. A transport without such messages takes it as any other.
  virtual bool expect(int /*from*/, const Tag& /*tag*/, const Forms& /*forms*/) { return false; }
  virtual void isend_expected(int to, const Tag& tag, Values values) { isend(to, tag, std::move(values)); }

  // If the message has arrived, moves it into `values` and returns true. Never blocks. Throws Aborted.
  virtual bool try_receive(int from, const Tag& tag, Values& values) = 0;
  // Waits for the message. Throws Aborted, or after `timeout` seconds Error that names the waiting rank and the
  // message.
  virtual Values receive(int from, const Tag& tag, double timeout) = 0;

  // Called between layers of a computation, for transports that move no data on their own.
  virtual void progress() {}

  // Waits until everything that was sent has left this rank, so that the process may end. Throws as receive does.
  void flush(double timeout);
  // A rank that has not taken all that was sent to it, if there is one. Never blocks. Throws Aborted.
  virtual std::optional<int> unsent_to() { return std::nullopt; }

  // The number by which errors name a rank: that in the network of all ranks of the run.
  virtual int named(int rank) const { return rank; }

  // Sums of these ranks of the transport, by other means than messages (group_sums.h). Null: there are none.
  virtual GroupSums* sums_of(const std::vector<int>& /*ranks*/) { return nullptr; }

  // Makes the present and future waits of every rank throw Aborted. May be called from any thread.
  virtual void abort(const std::string& reason) = 0;
  // After an abort: the rank that failed first, and its reason. Ranks that fail at the same time agree on one, so that
  // one reports. Nothing if the transport does not know.
  struct Failure {
    int rank = 0;
    std::string reason;
  };
  virtual std::optional<Failure> first_failure() const { return std::nullopt; }

 protected:
  // Throw Error unless it is a rank of this transport.
  void check_receiver(int to) const;
  void check_sender(int from) const;
};

}  // namespace twobp
