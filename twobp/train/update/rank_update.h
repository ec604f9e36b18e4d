// A rank's part of the update: the sums of its gradients over the uses of tied weights and over replicas, the global
// norm, clipping and the optimizer. Only the rank's thread uses it. Sums are taken in model order, so that the bits do
// not depend on the number of stages.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "twobp/nn/parameter.h"
#include "twobp/pipeline/gradient_reducer.h"
#include "twobp/pipeline/observer.h"
#include "twobp/pipeline/step_request.h"
#include "twobp/train/update/optimizer.h"
#include "twobp/train/update/optimizer_shards.h"
#include "twobp/train/update/rates.h"
#include "twobp/transport/collectives.h"

namespace twobp {

// The weights of a model and where they are used. A weight that several layers use is tied (parameters of one name).

class Pipeline;
class TiedSum;

struct WeightUse {
  Parameter* parameter = nullptr;  // null: on another process
  int layer = 0;                   // index in the model
  int stage = 0;
  int rank = 0;
  bool trainable = true;
  bool hidden = false;  // see ParameterGroups::rule_of
};

// The uses of one weight, in model order.
struct UsedWeight {
  std::vector<WeightUse> uses;
  // Its ranks are threads that compute in one memory, so that all uses have one value. The rank of the first use
  // updates it, while the others wait.
  bool shared = false;

  // The rank's first parameter for the weight; it has the gradient. Null if the rank has none, or if another rank
  // updates the weight.
  Parameter* on(int rank) const;
  // The ranks that use a tied weight. Empty if the weight is not tied or not trained, or if `rank` is not one of them.
  std::set<int> ranks_of_tied(int rank) const;
};

struct WeightUses {
  // Throws Error if a tied weight has two shapes. Gives the uses of shared weights a common value.
  explicit WeightUses(Pipeline& pipeline);

  std::vector<UsedWeight> all;      // in the order of their first use
  std::vector<Parameter*> weights;  // that this process holds, each once, in model order
  std::vector<std::string> names;   // of all weights of the model, by their parts
  int64_t numel = 0;                // of all weights of the model
  int layers = 0;                   // of the model
};

// A running mean of the weights of one rank, or of its share of them. Evaluation and saving use it in place of the
// weights (optimizer.average). After the first step it is a copy of the weights, and after each later one
//   mean <- decay * mean + (1 - decay) * weights
// as in torch.optim.swa_utils.AveragedModel.
class WeightAverage {
 public:
  // Allocates the means on the calling thread.
  WeightAverage(double decay, const std::vector<Optimizer::Item>& items);

  // Adds the weights after the step of that number, counted from 1.
  void add(int64_t step);
  // Exchanges the weights and their means. The values of shares are to be refreshed.
  void swap();
  void add_to(Savepoint& savepoint) const;
  // The means, for checkpoints.
  std::vector<Optimizer::State> state() const;

 private:
  double decay_;
  std::vector<Optimizer::Item> items_;
  std::vector<at::Tensor> means_;
};

class Pipeline;

// The results of an update, one for each step.
struct UpdateResult {
  at::Tensor squares;  // by layer: the sum of its gradients' squares (square_sums.h), from one rank or its replicas
  bool may_presume = false;
  double grad_norm = 0;  // of all gradients, before clipping
  bool skipped = false;  // a scaled gradient was not finite
};

// The same for all ranks.
struct UpdateSettings {
  double clip_norm = 0;  // 0: none
  double timeout = 300;  // seconds, of each wait
  int64_t bucket_bytes = 0;

  // Whether the decision to take a step, or its factor, depends on all ranks.
  bool depends_on_norm(const LossScale& scale) const { return clip_norm > 0 || scale.adapts; }
};

// What to do about numbers that are not finite.
std::string advice_if_not_finite(const Pipeline& pipeline);

class RankUpdate {
 public:
  // Gives the uses on the rank a common value tensor, allocates the optimizer state, and with replicas lets the
  // pipeline sum gradients in buckets. Pipeline and uses outlive it.
  RankUpdate(Pipeline& pipeline, const WeightUses& uses, int rank, const OptimizerConfig& config,
             const UpdateSettings& settings);
  ~RankUpdate();

  // See Update.
  void apply(double lr, const std::vector<Parameter*>& complete);
  std::vector<Waited> run(int64_t step, double lr, UpdateResult& result);
  Settled settle();
  void make_savepoint(bool float16);
  void show_gradients_to(std::shared_ptr<Observer> observer) { observers_.push_back(std::move(observer)); }
  void use(const LossScale& scale) { scale_ = scale; }
  bool is_open() const { return open_.has_value(); }
  int64_t taken_back() const { return taken_back_; }
  // The pipeline's stages stream gradients from now on, or no longer.
  void renew_sums() {
    if (reducer_) sum_over_replicas();
  }
  void swap_average();
  // With shards: see Update::with_masters.
  void take_masters();
  void give_masters_back(bool all_have_them);
  // Collective: all ranks have the same `squares`, by layer.
  [[noreturn]] void fail_not_finite(const std::vector<double>& squares, int64_t step);
  std::vector<Optimizer::State> state() const;  // of the optimizer and of the running means
  int64_t optimizer_steps() const { return optimizer_->steps(); }
  void restored(int64_t optimizer_steps);

 private:
  // A step that the rank has taken before its norm is known.
  struct OpenStep {
    int64_t step = 0;
    double lr = 0;
    at::Tensor squares;
    Exchange norm;  // of the squares
  };

  // What the rank trains, each value once.
  std::vector<Optimizer::Item> trained_items();
  void shard(const OptimizerConfig& config, const std::vector<Optimizer::Item>& items);
  // Leaves of the items, and of the masters, what this replica updates.
  void keep_own(std::vector<Optimizer::Item>& items) const;
  void sum_over_replicas();
  // Of the weights that this rank uses, in one order on all ranks.
  std::vector<std::unique_ptr<TiedSum>> begin_tied_sums(int64_t step);
  // The sums over the ranks, and the step or what presumes it.
  void sum_and_take(int64_t step, double lr, UpdateResult& result);
  // Waits until shared weights are updated, or says so.
  void hand_on_shared(int64_t step);
  // Over replicas: each has changed them in its own way.
  void average_buffers();
  // By layer, of the gradients that this rank has of the weights that it uses first: those that count. Returns whether
  // all are finite, also those that count on another replica.
  bool sum_squares(at::Tensor& squares);
  // Shows the gradients to the observers, too.
  void add_squares_of(const std::vector<const Parameter*>& parameters);
  void show(const Parameter& parameter) const;
  bool counts(const Parameter& parameter) const;
  // The numbers of the gradient that this replica applies, and those of each expert, if its blocks of squares are its
  // own.
  at::Tensor own_gradient(const Parameter& parameter) const;
  std::vector<at::Tensor> own_gradients(const Parameter& parameter) const;
  bool owns(const Parameter* parameter) const;
  // The optimizer's factor for gradients. None if the step is skipped.
  std::optional<double> factor_for(const at::Tensor& squares) const;
  void take(int64_t step, double lr, std::optional<double> factor);
  void add_to_average();
  // The corrections of routers follow the step's counts, or these are dropped.
  void balance_experts(bool taken);
  void leave_open(OpenStep step);
  // All waits of the rank's update go through wait_for with this.
  Patience patience() { return {settings_.timeout, &waits_}; }

  Pipeline& pipeline_;
  const WeightUses& uses_;
  int rank_;
  UpdateSettings settings_;
  std::unique_ptr<Transport> holders_;        // of the same experts; null: each replica has all
  std::unique_ptr<GradientReducer> reducer_;  // null: one replica
  std::unique_ptr<OptimizerShards> shards_;   // null: not sharded
  std::unique_ptr<WeightAverage> average_;    // null: none
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<Savepoint> before_;                 // null: the rank never presumes
  std::vector<std::shared_ptr<Observer>> observers_;  // of gradients
  LossScale scale_;
  bool as_presumed_ = true;  // the last step was neither clipped nor skipped
  std::optional<OpenStep> open_;
  int64_t taken_back_ = 0;
  std::set<const Parameter*> tied_;             // uses of tied weights
  std::map<const Parameter*, int64_t> layers_;  // of the first use, in the model
  // Of the current step: the gradients that apply() has taken, and their squares by layer.
  std::set<const Parameter*> applied_;
  at::Tensor squares_;
  at::Tensor uncounted_;       // those that count on another replica
  std::vector<Waited> waits_;  // of the current update
};

// Sums of squares of gradients.
inline bool all_finite(const std::vector<double>& squares) {
  return std::ranges::all_of(squares, [](double value) { return std::isfinite(value); });
}

// The norm of all gradients. `squares`: by layer.
inline double norm_of(const std::vector<double>& squares) {
  return std::sqrt(std::accumulate(squares.begin(), squares.end(), 0.0));
}

}  // namespace twobp
