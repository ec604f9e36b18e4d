// How ranks exchange tensors. One Transport object belongs to one rank and is used by its thread alone
// (except abort), but subgroups of one endpoint by a thread each; over World::processes a second thread may
// send, too. Sends never block; receives are asked for, then tested or waited for, each wait with a time-out.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include <ATen/ATen.h>

#include "twobp/nn/values.h"

namespace twobp {

// What a message is. Behind it what `stage` and `micro_batch` of its tag are, where they are something else.
enum class MessageKind : uint8_t {
  kForward,       // the input of a stage
  kBackward,      // the output gradient of a stage
  kEvaluation,    // the input of a stage that is evaluated
  kTiedGradient,  // of a weight that several stages use: the weight; the use
  kWeights,       // that a replica has updated: which message of them; 0
  kStepReport,    // 0; the process whose it is
  kClock,         // question or answer; the round
  // Of all ranks together: 0; the number of it (collectives.h, train/processes.h).
  kPart,
  kSum,
  kBroadcast,
  kGather,
  kBarrier,
  kEndOfWork,
  kVerdict,
  kNone,  // nobody sends it
};

// What identifies a message.
struct Tag {
  int64_t step = 0;
  int stage = 0;  // that receives it
  int micro_batch = 0;
  MessageKind kind = MessageKind::kForward;
  uint8_t group = 0;  // set by Subgroup: the same ranks may talk in several roles

  bool operator==(const Tag&) const = default;
};

std::string to_string(const Tag& tag);

// Thrown from waits after abort(): some other rank failed, its error is the one to report.
class Aborted : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Hands `values` to rank `to`. Sender and receiver may share memory afterwards: neither may write to it.
  virtual void isend(int to, const Tag& tag, Values values) = 0;

  // True and the message moved into `values` if it is there. Never blocks. Throws Aborted.
  virtual bool try_receive(int from, const Tag& tag, Values& values) = 0;
  // Waits for it. Throws Aborted, or Error after `timeout` seconds (says who waited for what).
  virtual Values receive(int from, const Tag& tag, double timeout) = 0;

  // Called between layers while compute runs, for transports that move nothing by themselves.
  virtual void progress() {}

  // Waits until everything sent has left this rank, so that the process may end. Throws as receive does.
  virtual void flush(double /*timeout*/) {}

  // Makes every rank's present and future waits throw Aborted. Any thread.
  virtual void abort(const std::string& reason) = 0;
};

}  // namespace twobp
