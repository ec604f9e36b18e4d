// The end of a training step: the updates of all ranks of this process (RankUpdate), and what concerns all of them.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "twobp/pipeline/step_request.h"
#include "twobp/train/update/rank_update.h"

namespace twobp {

class Pipeline;

// A tensor of a checkpoint, on one of the ranks that hold it. Packed weights are listed by their parts.
struct LiveTensor {
  std::string name;   // name of the part; for optimizer state plus ".exp_avg" and so on
  at::Tensor tensor;  // shares memory with the tensor in use
  int rank = 0;
  bool first = true;  // the first of the places that hold it, which all have the same values
  bool frozen = false;
};

class Update {
 public:
  // Makes each rank's update on its thread. With replicas, gradients are summed in buckets of `bucket_bytes` from the
  // pipeline's next step on.
  Update(Pipeline& pipeline, const OptimizerConfig& config, double clip_norm, double timeout,
         int64_t bucket_bytes = kBucketBytes);
  ~Update();
  static constexpr int64_t kBucketBytes = 25 << 20;

  // Allocates, on every rank, what taking back a step needs: copies of the weights, the optimizer's state and the
  // buffers, and with float16 of the gradients. Without savepoints, and with sharded state, ranks do not presume.
  void make_savepoints(bool float16);
  // Call it after Pipeline::stream_gradients, while the ranks are idle.
  void gradients_are_streamed();
  // From the next step on; see Observer::on_gradient.
  void show_gradients_to(const std::shared_ptr<Observer>& observer);
  // Sets the loss scale of the next step while the ranks are idle. From then on each rank adapts it.
  void use(const LossScale& scale);
  // Called before a step. Later calls fill in the result. `may_presume`: see run(). Every process passes the same
  // value.
  UpdateResult begin(bool may_presume) const;
  // For StepUpdate::apply, on the rank's thread.
  void apply(int rank, double lr, const std::vector<Parameter*>& complete) { ranks_[rank]->apply(lr, complete); }
  // For StepUpdate::run, on the rank's thread. With clipping or in float16, every rank
  // waits for the norm. Otherwise a rank takes the step as soon as it has its own gradients. In float16, a step whose
  // gradient is not finite is skipped. Ranks that may presume do not wait: they take the step as if it were neither
  // clipped nor skipped (unless the previous step was), and it is open until settle().
  std::vector<Waited> run(int rank, int64_t step, double lr, UpdateResult& result);
  // For StepUpdate::settle. Waits for the norm of an open step. If it is not as presumed, takes the step back and takes
  // the right one. Nothing may have been added to gradients since run(). Results that depend on weights must be
  // computed again.
  Settled settle(int rank);
  // The same on all ranks of this process, which must be idle.
  void settle_all();
  // What processes sum of a step when its ranks have updated: the squares, or nothing if the ranks sum them.
  std::vector<at::Tensor> to_sum(const LossScale& scale, UpdateResult& result) const;
  // Called after the step and that sum, on the thread that runs the pipeline. `scale` is the loss scale of its
  // gradients. If a gradient is not finite, throws Error on every process. It names the layer with a weight that is not
  // finite, or else the layer where the backward pass first met such a gradient.
  void finish(int64_t step, const LossScale& scale, UpdateResult& result);
  // Whether ranks wait for each other's gradients at the end of a step, because of tied weights.
  bool ties_ranks() const;
  // Exchanges the weights and their running means on all ranks of this process, which must be idle. Does nothing
  // without optimizer.average, and before the first step.
  void swap_averages();
  // Calls `body` between steps, on every process, while every weight of the processes' ranks has its whole master: with
  // sharded state, replicas have but shares of it otherwise. `body` may change masters in the same way on each replica.
  void with_masters(const std::function<void()>& body);
  // The number of steps that the ranks of this process have taken back so far.
  int64_t taken_back() const;

  // Every weight that this process holds, once, in model order. These are all weights if it has all ranks.
  const std::vector<Parameter*>& weights() const { return uses_.weights; }
  // The number of elements of all weights of the model, including those of other processes.
  int64_t numel() const { return uses_.numel; }

  // Everything that a run of steps changes, for checkpoints: the masters, in model order, and the optimizers' state
  // with the running means of the weights. Only what this process holds: with optimizer.shard, the optimizer state of
  // its replica's share. Weights: within with_masters.
  std::vector<LiveTensor> live_weights() const;
  std::vector<LiveTensor> live_optimizer_state() const;
  int64_t optimizer_steps() const { return first_rank().optimizer_steps(); }
  // Called on every rank's thread after the live tensors were written.
  void restored(int rank, int64_t optimizer_steps) { ranks_[rank]->restored(optimizer_steps); }

 private:
  RankUpdate& first_rank() const;  // of this process

  Pipeline& pipeline_;
  UpdateSettings settings_;
  WeightUses uses_;
  std::vector<std::unique_ptr<RankUpdate>> ranks_;  // null: in another process
  bool averages_ = false;
  bool shards_ = false;
};

}  // namespace twobp
