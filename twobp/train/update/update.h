// The end of a training step, run by every rank on its own thread: gradients of tied weights summed, then
// those of replicas, the global norm, clipping, the optimizer. Sums are taken in model order, so that the
// bits do not depend on the stage count.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "twobp/nn/parameter.h"
#include "twobp/pipeline/gradient_reducer.h"
#include "twobp/pipeline/step_input.h"
#include "twobp/train/update/loss_scale.h"
#include "twobp/train/update/optimizer.h"
#include "twobp/train/update/optimizer_shards.h"
#include "twobp/train/update/savepoint.h"
#include "twobp/transport/collectives.h"

namespace twobp {

class Pipeline;

// A tensor that a checkpoint holds, on one of the ranks that hold it. Packed weights come as their parts.
struct LiveTensor {
  std::string name;   // the part's; for optimizer state with ".exp_avg" and so on behind it
  at::Tensor tensor;  // shares memory with the one in use
  int rank = 0;
  bool first = true;  // of the places that hold it, all of which are the same
  bool frozen = false;
};

// What an update finds out, one for each step.
struct UpdateResult {
  at::Tensor squares;  // by layer of the model: the sum over its gradients, each rank's as it has them
  bool may_presume = false;
  double grad_norm = 0;  // of all gradients, before clipping
  bool skipped = false;  // a scaled gradient was not finite
};

class Update {
 public:
  // Finds the tied weights (parameters of one name), gives uses on one rank one value tensor, and allocates
  // the optimizer state on the rank threads. With replicas, gradients are summed in buckets of `bucket_bytes`
  // from the pipeline's next step on.
  Update(Pipeline& pipeline, const OptimizerConfig& config, double clip_norm, double timeout,
         int64_t bucket_bytes = kBucketBytes);
  ~Update();
  static constexpr int64_t kBucketBytes = 25 << 20;

  // Allocates, on every rank, what a step that may be taken back needs: a copy of the weights, the
  // optimizer's state and buffers, with float16 also of gradients. Without, and with sharded state, ranks do
  // not presume.
  void make_savepoints(bool float16);
  // While the ranks stand still: what gradients carry in the next step. From there on each rank adapts it.
  void use(const LossScale& scale);
  // Before a step; its result is filled in by what follows. `may_presume`: see run(). Every process says the
  // same.
  UpdateResult begin(bool may_presume) const;
  // For StepInput::finish. With clipping or in float16 every rank waits for the norm; else it takes the
  // step as soon as its own gradients are there. Returns the seconds the rank was busy. In float16 a step
  // whose gradient is not finite is skipped. Ranks that may presume do not wait: they take the step as if it
  // were neither clipped nor skipped (but not if the one before was), which is open until settle().
  double run(int rank, int64_t step, double lr, UpdateResult& result);
  // For StepInput::settle. Waits for the norm of an open step, and if it is not as presumed, takes the step
  // back and takes the right one. Nothing may have been added to gradients since run(); what depends on
  // weights is to be computed again.
  Settled settle(int rank);
  // The same on all ranks of this process, which stand still.
  void settle_all();
  // After the step, on the thread that runs the pipeline; `scale`: what its gradients carried. Throws Error
  // on every process if a gradient is not finite, naming the layer whose weight is not, or else the one where
  // the backward pass met it first.
  void finish(int64_t step, const LossScale& scale, UpdateResult& result);
  // Whether ranks wait for each other's gradients at the end of a step: those of a tied weight.
  bool ties_ranks() const;
  // Steps taken back so far, by the ranks of this process.
  int64_t taken_back() const;

  // Every weight that this process holds, once, in model order: all of them where it has all ranks.
  const std::vector<Parameter*>& weights() const { return weights_; }
  // Numbers in all weights of the model, of other processes too.
  int64_t numel() const { return numel_; }

  // Everything that a run of steps changes, for checkpoints: as masters, in model order, and the optimizers'.
  // What this process holds: with optimizer.shard, of optimizer state the share of its replica.
  std::vector<LiveTensor> live_weights() const;
  std::vector<LiveTensor> live_optimizer_state() const;
  int64_t optimizer_steps() const { return optimizers_[first_rank_]->steps(); }
  // After the live tensors were written to, on every rank's thread.
  void restored(int rank, int64_t optimizer_steps);

 private:
  struct Use {
    Parameter* parameter = nullptr;  // null: another process's
    int layer = 0;                   // in the model
    int stage = 0;
    int rank = 0;
    bool trainable = true;
  };
  // A step that a rank has taken before its norm was known.
  struct OpenStep {
    int64_t step = 0;
    double lr = 0;
    at::Tensor squares;
    AllReduce norm;  // of the squares
  };
  struct RankState {
    LossScale scale;
    bool as_presumed = true;  // the last step was neither clipped nor skipped
    std::optional<OpenStep> open;
    std::unique_ptr<Savepoint> before;  // null: it never presumes
    int64_t taken_back = 0;
  };
  // Uses of one weight in model order; more than one if it is tied.
  using Uses = std::vector<Use>;

  void find_weights();
  void sum_over_replicas(int rank, int64_t bucket_bytes);
  void make_optimizer(int rank, const OptimizerConfig& config);
  // The first of the rank's parameters for a weight, which has its gradient; null: it has none.
  static Parameter* parameter_of(const Uses& uses, int rank);
  // The ranks that use a tied weight that is trained; empty if it is not, or `rank` is not one of them.
  static std::set<int> ranks_of_tied(const Uses& uses, int rank);
  void send_tied(int rank, int64_t step);
  // Return the seconds spent waiting.
  double sum_tied(int rank, int64_t step);
  double sum_buckets(int rank);
  // What is in no bucket: tied weights' gradients, and buffers, whose mean is taken.
  double sum_others(int rank);
  double receive_shards(int rank, int64_t step);
  double waited_since(int rank, double begin);
  // By layer of the model, of the rank's own; false if one is not finite.
  bool sum_squares(int rank, at::Tensor& squares);
  // Whether and how a step is taken depends on all ranks.
  bool depends_on_norm(const LossScale& scale) const { return clip_norm_ > 0 || scale.adapts; }
  // What the optimizer is to multiply gradients by; none if the step is skipped.
  std::optional<double> factor_for(const at::Tensor& squares, double loss_scale) const;
  // Returns the seconds spent waiting.
  double take(int rank, int64_t step, double lr, std::optional<double> factor);
  void leave_open(int rank, OpenStep step);
  // Collective: all ranks have the same `squares`.
  [[noreturn]] void fail_not_finite(int rank, const at::Tensor& squares, int64_t step);

  Pipeline& pipeline_;
  double clip_norm_;
  double timeout_;
  std::vector<Uses> all_;  // in order of the first use
  std::vector<Parameter*> weights_;
  std::vector<std::unique_ptr<Optimizer>> optimizers_;      // by rank
  std::vector<std::unique_ptr<GradientReducer>> reducers_;  // by rank; null: one replica
  std::vector<std::unique_ptr<OptimizerShards>> shards_;    // by rank; null: not sharded
  std::vector<RankState> states_;                           // by rank
  int64_t numel_ = 0;
  int first_rank_ = 0;  // of this process
};

}  // namespace twobp
