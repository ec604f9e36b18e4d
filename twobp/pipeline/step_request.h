// What a caller asks of a step, in addition to its plan and its batch.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "twobp/core/wait.h"
#include "twobp/nn/context.h"
#include "twobp/nn/parameter.h"
#include "twobp/pipeline/profile/slices.h"

namespace twobp {

// Asks whether the run is to end. The ranks of one process may give up a step, or a batch of an evaluation, at any
// instruction. From then on F, I and W do nothing, but messages still go to their receivers, so that none is left for a
// later step.
class EarlyEnd {
 public:
  // `asked`: whether this process wants the run to end. Every rank calls it if the step may be given up; else it is
  // called when the ranks are done. A step may not be given up if it overlaps with another one, is launched as a graph,
  // has wanted events, or is part of a run of several processes or replicas.
  EarlyEnd(std::function<bool()> asked, bool may_give_up) : asked_(std::move(asked)), may_give_up_(may_give_up) {}

  bool asked() const { return asked_(); }
  bool may_give_up() const { return may_give_up_; }
  // Whether this rank skips its work from now on. True on all ranks once it is true on one.
  bool skips() {
    if (!may_give_up_) return false;
    State state = state_;
    if (state == State::kRuns && asked_() && state_.compare_exchange_strong(state, State::kGivenUp)) return true;
    return state == State::kGivenUp;
  }
  // Called when a rank of a training step has done all its instructions, before the update. Returns false if the step
  // is given up. Otherwise no rank can give it up any more.
  bool completes() {
    State state = State::kRuns;
    state_.compare_exchange_strong(state, State::kWhole);
    return state != State::kGivenUp;
  }
  bool given_up() const { return state_ == State::kGivenUp; }

 private:
  enum class State : uint8_t { kRuns, kWhole, kGivenUp };
  std::function<bool()> asked_;
  bool may_give_up_;
  std::atomic<State> state_{State::kRuns};
};

// The result on a rank of the previous step's update. If the update does not stand, the work that the rank did on the
// new step in vain counts as its start-up.
struct Settled {
  bool stands = true;     // false: the weights have changed since the rank ended that step
  double loss_scale = 1;  // of the next step
};

// The end of a step on each rank. All calls come on the rank's thread.
class StepUpdate {
 public:
  virtual ~StepUpdate() = default;
  // Before run(), of a stage that streams its gradients: those of these parameters are complete, and no work of the
  // step reads the weights any more. Applies and forgets them, apart from those of tied weights, which wait for run().
  virtual void apply(int rank, const std::vector<Parameter*>& complete) = 0;
  // After the rank's last instruction: sums, clips and applies the gradients. Returns its waits, in order.
  virtual std::vector<Waited> run(int rank) = 0;
  // Called if the previous step was under way when this one began, after the rank's leading F, before it adds to a
  // gradient or computes a loss. If the previous step does not stand, which is so on all ranks or on none, the rank
  // runs the leading F again.
  virtual Settled settle(int rank) = 0;
};

// The factors of the loss (see Context).
struct LossFactors {
  LossFactor weight = 1;
  LossFactor scale = 1;
};

struct StepRequest {
  uint64_t seed = 0;
  int64_t step = 0;               // of an evaluation: the number of its batch
  int64_t first_micro_batch = 0;  // this replica's first, counted over all replicas
  bool training = true;
  // Of an evaluation: layers run F as in training, and so change their buffers. What the last layer gives beside the
  // loss comes here, by micro-batch, in the process that runs it.
  std::vector<Values>* predictions = nullptr;
  LossFactors loss;
  bool want_events = false;               // the same on every process
  std::shared_ptr<StepUpdate> update;     // null: gradients stay as they are
  std::shared_ptr<EarlyEnd> early_end{};  // null: nobody asks whether the run is to end
  std::vector<Fields> next{};             // the first micro-batches of the next step, if they are known
};

// The first micro-batches of a step, known to the step before, which runs F of frozen stages for them
// (StepPlan::ahead).
struct NextBatch {
  int64_t step = 0;
  std::vector<Fields> micro_batches;  // copies
  std::vector<std::shared_ptr<const StagesOfLayers>> costs;

  // The F of a frozen stage that run.
  int count(int stage) const { return std::max(0, static_cast<int>(micro_batches.size()) - stage); }
  // Whether these are the first of `batch`, to the bit.
  bool begins(const std::vector<Fields>& batch) const;
};

// The micro-batches of a step. With slices, `micro_batches` has those of each slice, and the others are of the whole
// micro-batches.
struct StepBatch {
  std::vector<Fields> micro_batches;
  std::vector<Fields> sequences;
  std::vector<Cuts> cuts;
  // Of each whole micro-batch: the costs of layers, as Pipeline::layer_costs().
  std::vector<std::shared_ptr<const StagesOfLayers>> costs{};
  std::shared_ptr<const NextBatch> foreseen{};  // these micro-batches, if the step before knew them
  std::shared_ptr<const NextBatch> next{};      // those of the next step; null: they are not known, or of no use
};

}  // namespace twobp
