// The update's steps: the norm of all gradients, and the work that depends on it.
#include <algorithm>
#include <cmath>

#include "twobp/core/check.h"
#include "twobp/core/clock.h"
#include "twobp/nn/device/device.h"
#include "twobp/nn/kernels/operators.h"
#include "twobp/nn/kernels/products/rows.h"
#include "twobp/pipeline/executor/rank_executor.h"
#include "twobp/pipeline/memory/memory_meter.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/train/update/update.h"
#include "twobp/transport/world.h"

namespace twobp {
namespace {

// Number of the sum of squares among the pipeline's collectives.
constexpr int kNormNumber = 1;

// By gradient. The host waits for a device once.
std::vector<double> sums_of_squares(const std::vector<at::Tensor>& grads) {
  std::vector<double> sums;
  std::vector<at::Tensor> later;
  for (const at::Tensor& grad : grads) {
    if (by_operators(grad)) {
      later.push_back(operators::sum_of_squares(grad));
      continue;
    }
    dispatch_float(grad.scalar_type(), "gradient norm", [&](auto zero) {
      using S = decltype(zero);
      sums.push_back(kernels<S>().sum_of_squares(numbers<S>(grad), grad.numel()));
    });
  }
  if (later.empty()) return sums;
  const at::Tensor read = at::stack(later).cpu();
  return {read.const_data_ptr<double>(), read.const_data_ptr<double>() + read.numel()};
}

bool all_finite(const at::Tensor& squares) {
  const double* values = squares.const_data_ptr<double>();
  return std::all_of(values, values + squares.numel(), [](double value) { return std::isfinite(value); });
}

double norm_of(const at::Tensor& squares) {
  double sum = 0;
  for (int64_t i = 0; i < squares.numel(); ++i) sum += squares.const_data_ptr<double>()[i];
  return std::sqrt(sum);
}

}  // namespace

void Update::use(const LossScale& scale) {
  for (RankState& state : states_) state.scale = scale;
}

UpdateResult Update::begin(bool may_presume) const {
  UpdateResult result;
  result.squares = at::zeros({static_cast<int64_t>(pipeline_.model().layers.size())},
                             at::TensorOptions().dtype(at::kDouble));
  result.may_presume = may_presume;
  return result;
}

bool Update::sum_squares(int rank, at::Tensor& squares, double& waited) {
  const OptimizerShards* const shards = shards_[rank].get();
  std::vector<at::Tensor> grads;
  std::vector<size_t> places;
  std::vector<int> layers;
  for (const Uses& uses : all_) {
    const Parameter* parameter = parameter_of(uses, rank);
    if (parameter == nullptr || uses.front().rank != rank || !parameter->trainable()) continue;
    if (shards ? shards->owns(parameter) : parameter->has_grad()) {
      grads.push_back(parameter->grad);
      places.push_back(layers.size());
    }
    layers.push_back(uses.front().layer);
  }
  const std::vector<double> sums = sums_of_squares(grads);
  at::Tensor all = at::zeros({static_cast<int64_t>(layers.size())}, at::kDouble);
  double* const by_parameter = all.mutable_data_ptr<double>();
  for (size_t i = 0; i < sums.size(); ++i) by_parameter[places[i]] = sums[i];
  if (shards) {  // the other replicas' numbers are zero, so adding them changes no bit
    const double begin = now_seconds();
    all_reduce_sum(*pipeline_.world().data[rank], all, timeout_);
    waited += waited_since(rank, begin);
  }
  bool finite = true;
  for (size_t i = 0; i < layers.size(); ++i) {
    finite = finite && std::isfinite(by_parameter[i]);
    squares.mutable_data_ptr<double>()[layers[i]] += by_parameter[i];
  }
  return finite;
}

std::optional<double> Update::factor_for(const at::Tensor& squares, double loss_scale) const {
  if (!all_finite(squares)) return std::nullopt;
  const double norm = norm_of(squares) / loss_scale;
  return (clip_norm_ > 0 ? std::min(1.0, clip_norm_ / (norm + 1e-6)) : 1) / loss_scale;
}

double Update::run(int rank, int64_t step, double lr, UpdateResult& result) {
  const double begin = now_seconds();
  RankState& state = states_[rank];
  const double scale = state.scale.value;
  send_tied(rank, step);
  double waited = sum_buckets(rank);
  waited += sum_tied(rank, step);
  waited += sum_others(rank);
  // One sum of squares per layer. The entries of other ranks' layers are zero, so adding them over ranks
  // changes no bit.
  at::Tensor squares = at::zeros_like(result.squares);
  const bool finite = sum_squares(rank, squares, waited);
  const bool depends = depends_on_norm(state.scale);
  if (!depends || result.may_presume) {
    // finish() sums them over processes. The ranks of this process write to different layers.
    for (int64_t layer = 0; layer < squares.numel(); ++layer) {
      const double sum = squares.const_data_ptr<double>()[layer];
      if (sum != 0) result.squares.mutable_data_ptr<double>()[layer] = sum;
    }
  }
  if (!depends) {
    waited += take(rank, step, lr, finite ? std::optional<double>(1) : std::nullopt);
    return now_seconds() - begin - waited;
  }
  AllReduce norm(pipeline_.rank(rank).transport(), squares, kNormNumber);
  // All ranks decide alike: if the step is wrong, all drop what a rank sent before it settled.
  if (result.may_presume && state.before && state.as_presumed) {
    leave_open(rank, {step, lr, squares, std::move(norm)});
    return now_seconds() - begin - waited;
  }
  const double wait = now_seconds();
  norm.wait(timeout_);
  waited += waited_since(rank, wait);
  if (!result.may_presume && rank == first_rank_) result.squares.copy_(squares);
  const std::optional<double> factor = factor_for(squares, scale);
  state.as_presumed = factor == 1 / scale;
  waited += take(rank, step, lr, factor);
  return now_seconds() - begin - waited;
}

double Update::take(int rank, int64_t step, double lr, std::optional<double> factor) {
  states_[rank].scale.adapt(!factor);
  if (!factor) {
    optimizers_[rank]->skip();
    if (shards_[rank]) shards_[rank]->forget_gradients();
    return 0;
  }
  optimizers_[rank]->step(lr, *factor);
  double waited = 0;
  if (shards_[rank]) {
    shards_[rank]->send(step);
    waited = receive_shards(rank, step);
  }
  add_to_average(rank);
  return waited;
}

void Update::add_to_average(int rank) {
  if (averages_[rank]) averages_[rank]->add(optimizers_[rank]->steps());
}

void Update::make_savepoints(bool float16) {
  if (pipeline_.ranks() == 1) return;  // a single rank has the norm at once
  pipeline_.on_ranks([&](int rank) {
    if (shards_[rank]) return;
    auto before = std::make_unique<Savepoint>();
    optimizers_[rank]->add_to(*before, /*gradients=*/float16);
    if (averages_[rank]) averages_[rank]->add_to(*before);
    for (const Uses& uses : all_) {  // the next step's F may change it before settle()
      const Parameter* parameter = parameter_of(uses, rank);
      if (parameter != nullptr && parameter->is_buffer()) before->add(parameter->value, uses.front().stage);
    }
    states_[rank].before = std::move(before);
  });
}

void Update::leave_open(int rank, OpenStep step) {
  RankState& state = states_[rank];
  optimizers_[rank]->complete_gradients();
  state.before->save();
  optimizers_[rank]->step(step.lr, 1 / state.scale.value);
  add_to_average(rank);
  state.open = std::move(step);
}

Settled Update::settle(int rank) {
  RankState& state = states_[rank];
  if (!state.open) return {true, state.scale.value};
  OpenStep open = std::move(*state.open);
  state.open.reset();
  open.norm.wait(timeout_);
  const std::optional<double> factor = factor_for(open.squares, state.scale.value);
  state.as_presumed = factor == 1 / state.scale.value;
  if (state.as_presumed) {
    state.scale.adapt(false);
  } else {
    state.before->roll_back();
    optimizers_[rank]->undo();
    ++state.taken_back;
    take(rank, open.step, open.lr, factor);
  }
  return {state.as_presumed, state.scale.value};
}

void Update::settle_all() {
  const auto& here = pipeline_.world().local_ranks();
  if (std::none_of(here.begin(), here.end(), [&](int rank) { return states_[rank].open.has_value(); }))
    return;
  pipeline_.on_ranks([&](int rank) { settle(rank); });
}

int64_t Update::taken_back() const {
  int64_t count = 0;
  for (const RankState& state : states_) count += state.taken_back;
  return count;
}

void Update::finish(int64_t step, const LossScale& scale, UpdateResult& result) {
  World& world = pipeline_.world();
  const MemoryMeter::Watch watch(pipeline_.meter());
  if (!depends_on_norm(scale) || result.may_presume) {
    // Replicas have the same summed gradients, so only those of the first count.
    if (world.replica > 0) result.squares.zero_();
    all_reduce_sum(*world.processes, result.squares, timeout_);
  }
  result.grad_norm = norm_of(result.squares) / scale.value;
  const bool finite = all_finite(result.squares);
  result.skipped = !finite && scale.adapts;
  if (!finite && !result.skipped) {
    pipeline_.on_ranks([&](int rank) { fail_not_finite(rank, result.squares, step); });
  }
}

void Update::fail_not_finite(int rank, const at::Tensor& squares, int64_t step) {
  at::Tensor bad_weights = at::zeros_like(squares);
  for (const Uses& uses : all_) {
    for (const Use& use : uses) {
      if (use.rank == rank && !at::isfinite(use.parameter->value).all().item<bool>()) {
        bad_weights.mutable_data_ptr<double>()[use.layer] = 1;
      }
    }
  }
  all_reduce_sum(pipeline_.rank(rank).transport(), bad_weights, timeout_);
  const auto& layers = pipeline_.model().layers;
  for (int64_t layer = 0; layer < squares.numel(); ++layer) {
    TWOBP_CHECK(bad_weights.const_data_ptr<double>()[layer] == 0, "a weight of layer ", layers[layer].name,
                " is not finite in step ", step,
                ": lower optimizer.lr, set train.clip_norm, or look at the data");
  }
  int64_t last = squares.numel() - 1;
  while (last > 0 && std::isfinite(squares.const_data_ptr<double>()[last])) --last;
  fail("the gradient of layer ", layers[last].name, " is not finite in step ", step,
       ": lower optimizer.lr, set train.clip_norm, or look at the data");
}

}  // namespace twobp
