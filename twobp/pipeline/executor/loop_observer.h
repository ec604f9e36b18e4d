// Is told by a rank's loop what it does, on the rank's thread. The loop itself measures nothing and runs without an
// observer just as well.
#pragma once

#include <cstdint>
#include <span>

#include "twobp/core/wait.h"
#include "twobp/nn/layer.h"
#include "twobp/schedule/schedule.h"
#include "twobp/schedule/w_queue.h"

namespace twobp {

// A unit of W that I has made.
struct MadeUnit {
  P2Unit unit;
  int layer = 0;  // within the stage
  int leaf = 0;   // within the layer
};

class LoopObserver {
 public:
  virtual ~LoopObserver() = default;
  // F or I of a micro-batch. `w_pending`: whether W was pending before it. W and messages may come between a pause and
  // its end.
  virtual void op_begins(Op /*op*/, int /*stage*/, int /*micro_batch*/, bool /*w_pending*/) {}
  virtual void op_pauses() {}
  virtual void op_resumes() {}
  // `units`: of W, that I has made.
  virtual void op_ends(int /*units*/) {}
  // In F: as many of the micro-batch's tokens chose each expert of this layer of the model. See ExpertGroup::count.
  virtual void experts_chosen(int /*layer*/, const at::Tensor& /*tokens*/) {}
  // Of two F or I under way, which have paused, the other one goes on, or begins.
  virtual void turn_passes() {}
  // One unit of W, of these micro-batches.
  virtual void w_begins() {}
  virtual void w_ends(const MadeUnit& /*unit*/, std::span<const WUnits> /*together*/) {}
  // Gradients that are complete are applied before the end of the step, between units of W.
  virtual void update_begins() {}
  virtual void update_ends() {}
  // The rank waits, while W is pending or not. For experts it waits within an F or I, which pauses.
  virtual void wait_begins(bool /*w_pending*/, WaitCause /*cause*/) {}
  virtual void wait_ends() {}
  struct Message {
    bool sent = false;  // or received
    int stage = 0;      // of this rank
    int peer = 0;       // the other stage
    int micro_batch = 0;
    int64_t bytes = 0;
  };
  virtual void message_begins() {}
  virtual void message_ends(const Message& /*message*/) {}
};

}  // namespace twobp
