// One rank of a pipeline: what it keeps from step to step, and the course of a step around its loop (StepLoop):
// beginning it anew, giving it up, recording it as a graph, its update and its accounts.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "twobp/pipeline/executor/accounts.h"
#include "twobp/pipeline/executor/step_loop.h"

namespace twobp {

struct RankResult {
  double loss = 0;
  std::optional<int64_t> right;  // see StepReport
  RankAccount account;
};

class RankExecutor {
 public:
  // With `accounts`, results have a RankAccount; without, it is empty.
  RankExecutor(RankParts parts, bool accounts);

  // Runs the rank's part of a step on the calling thread. The schedule must have been validated. `begun_early`: the
  // previous step is under way on other ranks. Errors carry rank, step and instruction.
  RankResult run(const StepPlan& plan, const StepRequest& request, const StepBatch& batch, bool begun_early);
  // run() in two parts, for a graph of all ranks (see WorkGraph). record() is called while a device records. It
  // launches all instructions after `begin` and returns their end. Ranks take turns: each runs until it waits for a
  // message.
  DeviceEvent record(const StepPlan& plan, const StepRequest& request, const StepBatch& batch, const DeviceEvent& begin,
                     std::mutex& turn);
  // Runs the rest of the step after `end`, the end of the graph that did the recorded instructions.
  RankResult finish_recorded(const StepPlan& plan, const StepRequest& request, const DeviceEvent& end);
  // Null: gradients are not summed over replicas. The reducer outlives the steps.
  void sum_gradients_with(GradientReducer* reducer) { parts_.reducer = reducer; }
  // Forgets all tensors of an unfinished step.
  void clear();

  int rank() const { return parts_.rank; }
  const std::vector<std::unique_ptr<Stage>>& stages() const { return parts_.stages; }
  Transport& transport() { return parts_.transport; }

 private:
  class TakesTurns;
  class CopiesOfBuffers;

  void begin_accounts(const StepRequest& request, bool timed);
  LoopObserver& observer();
  // The leading forwards, again if the previous step does not stand.
  std::unique_ptr<StepLoop> begin_early(const StepPlan& plan, const StepRequest& request, const StepBatch& batch);
  // Receives and drops the messages that other ranks have sent for a step that begins anew.
  void drop_unreceived(const StepPlan& plan, const StepRequest& request, const StepBatch& batch);
  // Everything after the last instruction. `whole`: the step was not given up.
  RankResult end(const StepPlan& plan, const StepRequest& request, LossSum loss, bool whole);
  // Waits until the device has done what was launched. Messages and sums go on meanwhile.
  void drain_device();
  void update(const StepRequest& request);
  // Throws Error if there are gradients: a recorded step does not add to them.
  void expect_no_gradients() const;

  RankParts parts_;
  std::unique_ptr<Accounts> accounts_;
  // Written by the recorded instructions.
  LossSum recorded_loss_;
  std::vector<Parameter*> recorded_grads_;
};

}  // namespace twobp
