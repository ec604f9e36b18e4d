// The executor's report of a step, and its events: every op with its times.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "twobp/nn/kernels/products/product_time.h"
#include "twobp/schedule/schedule.h"

namespace twobp {

enum class MemoryCategory : int { kParameters, kGradients, kOptimizer, kActivations, kStash };
inline constexpr int kMemoryCategories = 5;
// "parameters", "gradients", "optimizer", "activations", "p2 stash"
std::string_view category_name(MemoryCategory category);

// The memory of a stage or a rank, as MemoryMeter counts it.
struct MemoryUse {
  std::array<int64_t, kMemoryCategories> now{};      // bytes, by MemoryCategory
  std::array<int64_t, kMemoryCategories> at_peak{};  // categories at the moment of the highest total
  int64_t peak = 0;

  int64_t total() const;
  int64_t held() const {  // bytes of micro-batches, in contrast to the model's own
    return now[static_cast<int>(MemoryCategory::kActivations)] + now[static_cast<int>(MemoryCategory::kStash)];
  }
};

// One thing that a rank did. The events of a rank are in order and disjoint; together with the executor's own time
// between them they make up the step. A W event is a single unit (one leaf layer, one or several micro-batches). An F,
// I or optimizer event is the whole stage. It comes in parts if something else ran in between: W under `off` or to make
// room, or a wait for other ranks.
struct Event {
  enum class Kind : uint8_t { kForward, kBackwardP1, kBackwardP2, kOptimizer, kIdle, kSend, kReceive };
  Kind kind = Kind::kForward;
  IdleCause cause = IdleCause::kNothing;  // of kIdle
  int stage = -1;
  int micro_batch = -1;  // the first of `count`
  int count = 1;         // micro-batches; more than one only for concatenated W
  int part = 0;          // of an F, I or optimizer event, counted from 0
  int layer = -1;        // within the stage, for W
  int unit = -1;         // leaf within the layer, for W
  std::string name;      // of the leaf, for W: "model.layers.2.mlp.down_proj"
  int peer = -1;         // the other stage, for messages
  int64_t bytes = 0;     // of the message
  double begin = 0;      // seconds on the monotonic clock
  double end = 0;
  // Bytes of the rank. `held`: activations and stash at the end. `total`: everything at the end. `peak`: the highest
  // total since the previous event.
  int64_t held = 0;
  int64_t total = 0;
  int64_t peak = 0;
};

// Seconds that a stage spent, and how often. The mean is the cost of one micro-batch. NaN, as in RankTimes, for a step
// that was launched as a graph (StepReport::timed).
struct StageTimes {
  double forward = 0;
  double backward_p1 = 0;
  double backward_p2 = 0;
  int micro_batches = 0;
  int p2_units = 0;         // per micro-batch
  ProductTime p2_products;  // of backward_p2
};

struct RankTimes {
  double begin = 0;  // first instruction
  double end = 0;    // end of the optimizer
  // Length of the step on this rank. Where steps overlap, it lasts from the end of this rank's part of the previous
  // step to the end of its part. 0: the whole step.
  double span = 0;
  double optimizer = 0;
  double busy = 0;          // F + I + W + optimizer, including W that it ran for other ranks
  ProductTime products;     // of busy
  int64_t allocations = 0;  // see BlockCache::allocations
  // Data parallel: the waits for sums of gradients over replicas, in the tail and before W of streamed gradients.
  double exposed = 0;
  std::array<double, kIdleCauses> idle{};  // by IdleCause; the rest of the step is the executor's own time
  int64_t instructions = 0;
};

// The tokens of a step, of all replicas and with padding, that chose each expert of a layer.
struct ExpertTokens {
  std::string layer;            // "model.layers.0.mlp"
  std::vector<int64_t> tokens;  // by expert

  // Those of the fullest expert over their mean: from 1 to the number of experts; 0 without tokens.
  double imbalance() const {
    int64_t fullest = 0;
    int64_t all = 0;
    for (const int64_t one : tokens) {
      fullest = std::max(fullest, one);
      all += one;
    }
    return all > 0 ? static_cast<double>(fullest) * static_cast<double>(tokens.size()) / static_cast<double>(all) : 0;
  }
};

struct StepReport {
  int64_t step = 0;
  double begin = 0;
  double end = 0;
  double loss = 0;               // sum over the micro-batches: the mean over the global batch
  std::optional<int64_t> right;  // correct predictions, in an evaluation of a model that predicts
  bool stop = false;             // some process wants the run to end
  bool given_up = false;         // see StepRequest::early_end: weights have not changed, the loss is unknown
  bool begun_early = false;      // before the previous step had ended; `begin` is the end of that step
  std::vector<RankTimes> ranks;
  std::vector<StageTimes> stages;
  std::vector<MemoryUse> stage_memory;
  std::vector<MemoryUse> rank_memory;
  std::vector<ExpertTokens> experts;       // of the layers that have some, in model order
  std::vector<std::vector<Event>> events;  // by rank; only if asked for

  double seconds() const { return end - begin; }
  // Whether F, I and W were timed one by one. A graph is timed only as a whole, so the seconds of its parts, busy and
  // idle are NaN.
  bool timed() const { return !std::isnan(ranks.front().busy); }
  double idle_fraction(int rank) const {
    const RankTimes& times = ranks[rank];
    return 1 - times.busy / (times.span > 0 ? times.span : seconds());
  }
  double mean_idle() const {
    double sum = 0;
    for (size_t r = 0; r < ranks.size(); ++r) sum += idle_fraction(static_cast<int>(r));
    return sum / static_cast<double>(ranks.size());
  }
};

class Parameter;

// Is told about every step after it is over, on the thread that runs the training loop.
class Observer {
 public:
  virtual ~Observer() = default;
  // Asked before every step. `step` counts from 1.
  virtual bool wants_events(int64_t /*step*/) const { return false; }
  virtual void on_step(const StepReport& report) = 0;
  // Asked when it is added.
  virtual bool wants_gradients() const { return false; }
  // A gradient that is complete and not applied yet: the sum over micro-batches, uses and replicas, times the loss
  // scale, not clipped. It has the parameter's shape, or, if optimizer.shard cuts it, is this replica's part, flat; in
  // the dtype of sums. Streamed gradients come one by one while W runs, and all others at the end of the step. On the
  // thread of the parameter's rank, so several calls may run at once. The tensor must not be kept: copy what you need.
  virtual void on_gradient(const Parameter& /*parameter*/, const at::Tensor& /*gradient*/) {}
};

}  // namespace twobp
