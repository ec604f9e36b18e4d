// The inputs of a step, in addition to its setup.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "twobp/nn/context.h"
#include "twobp/pipeline/p2_batching.h"
#include "twobp/pipeline/profile/slices.h"
#include "twobp/schedule/check/leading_forwards.h"
#include "twobp/schedule/p2_order.h"
#include "twobp/schedule/schedule.h"

namespace twobp {

class EarlyEnd;

// The result on a rank of the previous step's update. If the update does not stand, the work that the rank
// did on the new step in vain counts as its start-up.
struct Settled {
  bool stands = true;     // false: the weights have changed since the rank ended that step
  double loss_scale = 1;  // of the next step
};

struct StepInput {
  uint64_t seed = 0;
  int64_t step = 0;               // of an evaluation: the number of its batch
  int64_t first_micro_batch = 0;  // this replica's first, counted over all replicas
  bool training = true;
  LossFactor loss_weight = 1;  // see Context
  LossFactor loss_scale = 1;
  double timeout = 300;                 // seconds
  P2Order p2_order = P2Order::kOldest;  // of the W that is left at the end
  // On a device: launches the whole step as one graph (StepGraph). The graph is recorded when two steps in a
  // row have the same schedule and sizes of micro-batches. Not used for steps with events. Throws Error if
  // ranks are not on devices of this process, if the device has no graphs, if another step is under way, or
  // if there are gradients already.
  bool as_graph = false;
  bool want_events = false;  // the same on every process
  // Called on each rank's thread after its leading F, before it adds to a gradient or computes a loss. If the
  // previous step does not stand, which is so on all ranks or on none, the rank runs the leading F again.
  // Null: the previous step stands, and `loss_scale` is known.
  std::function<Settled(int rank)> settle;
  // Runs on each rank's thread after its last instruction: sums, clips and applies the gradients. Returns the
  // seconds that it was busy. Waits for other ranks do not count (RankExecutor::waited_in_finish).
  std::function<double(int rank)> finish;
  // Called when this process's ranks are done. Returns whether this process wants the run to end. Null: it
  // does not.
  std::function<bool()> stop;
  // With it, the step may be given up (StepReport::given_up). Not for a step that overlaps with another one,
  // is launched as a graph, has wanted events, or is part of a run of several processes or replicas. Null:
  // the step runs to its end.
  std::shared_ptr<EarlyEnd> early_end;

  // Set by the pipeline, for its executors.
  const Schedule* schedule = nullptr;
  const LeadingForwards* leading = nullptr;            // of the schedule
  const std::vector<Fields>* micro_batches = nullptr;  // with slices: of each slice
  const std::vector<Fields>* sequences = nullptr;      // with slices: of the whole micro-batches
  const std::vector<Cuts>* cuts = nullptr;             // with slices: of each micro-batch
  std::string input_field;                             // see ModelSpec
  P2Batching batching = P2Batching::kLoop;
  std::vector<int64_t> cap_per_rank;  // bytes of activations and stash; empty or 0: no cap
  // Whether a rank runs W while a message is not there (see simulate.h). False on devices, which have places.
  bool fills_waits = false;
  std::vector<std::vector<int>> p2_places;  // see p2_places.h; empty: W runs in no wait, or by fills_waits
  std::mutex* turn = nullptr;               // held by the rank that records
};

}  // namespace twobp
