// What a step is run with, beside its setup.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "twobp/nn/context.h"
#include "twobp/pipeline/executor/p2_batching.h"
#include "twobp/schedule/check/leading_forwards.h"
#include "twobp/schedule/p2_order.h"
#include "twobp/schedule/schedule.h"

namespace twobp {

class P2Offers;

// What the update of the step before has come to on a rank. Where it does not stand, what the rank has done
// for nothing counts as start-up of the step after it.
struct Settled {
  bool stands = true;     // false: weights have changed since the rank ended that step
  double loss_scale = 1;  // of the step after it
};

struct StepInput {
  uint64_t seed = 0;
  int64_t step = 0;               // of an evaluation: its batch
  int64_t first_micro_batch = 0;  // this replica's first, counted over all replicas
  bool training = true;
  double loss_weight = 1;  // see Context
  double loss_scale = 1;
  double timeout = 300;                 // seconds
  P2Order p2_order = P2Order::kOldest;  // of the W that is left at the end
  // Ranks take W off each other at the end of the step (p2_offers.h), if all are threads of this process and
  // no other step is under way (throws Error). Not where W is concatenated, replicas sum gradients or events
  // are wanted.
  bool p2_stealing = false;
  // On a device: the step is put in as one piece, which is recorded when two steps in a row have had the same
  // schedule, loss weights and scales, and sizes of micro-batches (StepGraph). Not where events are wanted.
  // Throws Error where ranks are not on one device, that has no graphs, another step is under way or there
  // are gradients already.
  bool as_graph = false;
  bool want_events = false;  // the same on every process
  // Called on each rank's thread when it has run its leading F, before it adds to a gradient or has a loss.
  // If the previous step does not stand, on all ranks alike, they are run again. Null: it stands, and
  // `loss_scale` is known.
  std::function<Settled(int rank)> settle;
  // Runs on each rank's thread after its last instruction: gradients summed, clipped, applied. Returns the
  // seconds it was busy (waits for other ranks left out; see RankExecutor::waited_in_finish).
  std::function<double(int rank)> finish;
  // Asked when this process's ranks are done: whether it wants the run to end. Null: it does not.
  std::function<bool()> stop;

  // Filled in by the pipeline, for its executors.
  const Schedule* schedule = nullptr;
  const LeadingForwards* leading = nullptr;  // of the schedule
  const std::vector<Fields>* micro_batches = nullptr;
  std::string input_field;  // see ModelSpec
  P2Batching batching = P2Batching::kLoop;
  std::vector<int64_t> cap_per_rank;  // bytes of activations and stash; empty or 0: no cap
  bool fills_waits = false;           // see simulate.h
  P2Offers* offers = nullptr;         // where ranks take W off each other; null: they do not
  std::mutex* turn = nullptr;         // of ranks that record
};

}  // namespace twobp
