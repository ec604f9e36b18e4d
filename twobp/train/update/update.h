// The end of a training step, run by every rank on its own thread: the sums of gradients over the uses of
// tied weights and then over replicas, the global norm, clipping and the optimizer. Sums are taken in model
// order, so that the bits do not depend on the number of stages.
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
#include "twobp/train/update/weight_average.h"
#include "twobp/transport/collectives.h"

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

// The results of an update, one for each step.
struct UpdateResult {
  at::Tensor squares;  // by layer of the model: the sum of its gradients' squares, each rank's for its layers
  bool may_presume = false;
  double grad_norm = 0;  // of all gradients, before clipping
  bool skipped = false;  // a scaled gradient was not finite
};

class Update {
 public:
  // Finds the tied weights (parameters of one name), and gives the uses on one rank a common value tensor.
  // Allocates the optimizer state on the rank threads. With replicas, gradients are summed in buckets of
  // `bucket_bytes` from the pipeline's next step on.
  Update(Pipeline& pipeline, const OptimizerConfig& config, double clip_norm, double timeout,
         int64_t bucket_bytes = kBucketBytes);
  ~Update();
  static constexpr int64_t kBucketBytes = 25 << 20;

  // Allocates, on every rank, what taking back a step needs: copies of the weights, the optimizer's state and
  // the buffers, and with float16 of the gradients. Without savepoints, and with sharded state, ranks do not
  // presume.
  void make_savepoints(bool float16);
  // Sets the loss scale of the next step while the ranks are idle. From then on each rank adapts it.
  void use(const LossScale& scale);
  // Called before a step. Later calls fill in the result. `may_presume`: see run(). Every process passes the
  // same value.
  UpdateResult begin(bool may_presume) const;
  // For StepInput::finish. Returns the seconds the rank was busy. With clipping or in float16, every rank
  // waits for the norm. Otherwise a rank takes the step as soon as it has its own gradients. In float16, a
  // step whose gradient is not finite is skipped. Ranks that may presume do not wait: they take the step as
  // if it were neither clipped nor skipped (unless the previous step was), and it is open until settle().
  double run(int rank, int64_t step, double lr, UpdateResult& result);
  // For StepInput::settle. Waits for the norm of an open step. If it is not as presumed, takes the step back
  // and takes the right one. Nothing may have been added to gradients since run(). Results that depend on
  // weights must be computed again.
  Settled settle(int rank);
  // The same on all ranks of this process, which must be idle.
  void settle_all();
  // Called after the step, on the thread that runs the pipeline. `scale` is the loss scale of its gradients.
  // If a gradient is not finite, throws Error on every process. It names the layer with a weight that is not
  // finite, or else the layer where the backward pass first met such a gradient.
  void finish(int64_t step, const LossScale& scale, UpdateResult& result);
  // Whether ranks wait for each other's gradients at the end of a step, because of tied weights.
  bool ties_ranks() const;
  // Exchanges the weights and their running means on all ranks of this process, which must be idle. Does
  // nothing without optimizer.average, and before the first step.
  void swap_averages();
  // The number of steps that the ranks of this process have taken back so far.
  int64_t taken_back() const;

  // Every weight that this process holds, once, in model order. These are all weights if it has all ranks.
  const std::vector<Parameter*>& weights() const { return weights_; }
  // The number of elements of all weights of the model, including those of other processes.
  int64_t numel() const { return numel_; }

  // Everything that a run of steps changes, for checkpoints: the masters, in model order, and the optimizers'
  // state with the running means of the weights. Only what this process holds: with optimizer.shard, the
  // optimizer state of its replica's share.
  std::vector<LiveTensor> live_weights() const;
  std::vector<LiveTensor> live_optimizer_state() const;
  int64_t optimizer_steps() const { return optimizers_[first_rank_]->steps(); }
  // Called on every rank's thread after the live tensors were written.
  void restored(int rank, int64_t optimizer_steps);

 private:
  struct Use {
    Parameter* parameter = nullptr;  // null: on another process
    int layer = 0;                   // index in the model
    int stage = 0;
    int rank = 0;
    bool trainable = true;
    bool hidden = false;  // see ParameterGroups::rule_of
  };
  // A step that a rank has taken before its norm is known.
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
    std::unique_ptr<Savepoint> before;  // null: the rank never presumes
    int64_t taken_back = 0;
  };
  // Uses of one weight in model order; more than one if it is tied.
  using Uses = std::vector<Use>;

  // Returns the names of all weights of the model.
  std::vector<std::string> find_weights();
  // What the rank trains, each value once; gives the uses on the rank a common value tensor.
  std::vector<Optimizer::Item> trained_items(int rank);
  void shard(int rank, const OptimizerConfig& config, const std::vector<Optimizer::Item>& items);
  void sum_over_replicas(int rank, int64_t bucket_bytes);
  void make_optimizer(int rank, const OptimizerConfig& config, std::vector<Optimizer::Item> items);
  // The rank's first parameter for a weight; it has the gradient. Null if the rank has none.
  static Parameter* parameter_of(const Uses& uses, int rank);
  // The ranks that use a tied weight. Empty if the weight is not tied or not trained, or if `rank` is not one
  // of them.
  static std::set<int> ranks_of_tied(const Uses& uses, int rank);
  void send_tied(int rank, int64_t step);
  // Return the seconds spent waiting.
  double sum_tied(int rank, int64_t step);
  double sum_buckets(int rank);
  // Sums what is in no bucket: tied weights' gradients, and buffers, which are averaged.
  double sum_others(int rank);
  double receive_shards(int rank, int64_t step);
  double waited_since(int rank, double begin);
  // Computes the sums of squares of the rank's own layers, by layer of the model. Returns false if one is not
  // finite. With shards, each replica computes those of its share and waits for the others', which adds to
  // `waited`: then they have read this replica's gradients, too.
  bool sum_squares(int rank, at::Tensor& squares, double& waited);
  // Whether the decision to take a step, or its factor, depends on all ranks.
  bool depends_on_norm(const LossScale& scale) const { return clip_norm_ > 0 || scale.adapts; }
  // The optimizer's factor for gradients. None if the step is skipped.
  std::optional<double> factor_for(const at::Tensor& squares, double loss_scale) const;
  // Returns the seconds spent waiting.
  double take(int rank, int64_t step, double lr, std::optional<double> factor);
  void add_to_average(int rank);
  void leave_open(int rank, OpenStep step);
  // Collective: all ranks have the same `squares`.
  [[noreturn]] void fail_not_finite(int rank, const at::Tensor& squares, int64_t step);

  Pipeline& pipeline_;
  double clip_norm_;
  double timeout_;
  std::vector<Uses> all_;  // in order of the first use
  std::vector<Parameter*> weights_;
  std::vector<std::unique_ptr<Optimizer>> optimizers_;      // by rank
  std::vector<std::unique_ptr<WeightAverage>> averages_;    // by rank; null: none
  std::vector<std::unique_ptr<GradientReducer>> reducers_;  // by rank; null: one replica
  std::vector<std::unique_ptr<OptimizerShards>> shards_;    // by rank; null: not sharded
  std::vector<RankState> states_;                           // by rank
  int64_t numel_ = 0;
  int first_rank_ = 0;  // of this process
};

}  // namespace twobp
