// Expert parallelism (pipeline.experts): replicas that share the experts of every layer. Each holds an equal part of
// them, so tokens travel to the replica that holds their expert, and results travel back.
#pragma once

#include <vector>

#include "twobp/nn/values.h"

namespace twobp {

// The part of a layer's experts that a replica holds: part `index` of `of` equal ones.
struct ExpertShare {
  int of = 1;
  int index = 0;
};

// The members of a group, as one of them sees them. In an F or I, all make the same exchanges in the same order. In an
// exchange each member sends a message to every other one.
class ExpertGroup {
 public:
  virtual ~ExpertGroup() = default;
  // Begins an exchange. `messages`: by member; this one's own is not sent.
  virtual void send(std::vector<Values> messages) = 0;
  // Waits for the others' messages of the exchange that has begun. Other work may run meanwhile. By member; this one's
  // own is empty. The messages are untrusted.
  virtual std::vector<Values> receive() = 0;
  // Is told how many of this member's tokens chose each expert of the layer: (experts), int64, on the host. Returns
  // whether they count in the step: not those of an F that runs again, or is only measured.
  virtual bool count(const at::Tensor& /*tokens*/) { return false; }
};

}  // namespace twobp
