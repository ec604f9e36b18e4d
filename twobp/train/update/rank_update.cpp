#include "twobp/train/update/rank_update.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/core/wait.h"
#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/kernels/rows/operators.h"
#include "twobp/pipeline/executor/rank_executor.h"
#include "twobp/pipeline/memory/memory_meter.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/stage.h"
#include "twobp/train/update/optimizer.h"
#include "twobp/transport/message.h"
#include "twobp/transport/subgroup.h"
#include "twobp/transport/world.h"

namespace twobp {
namespace {

Tag tied_tag(int64_t step, size_t weight, int use) {
  return {step, static_cast<int>(weight), use, MessageKind::kTiedGradient};
}

Tag updated_tag(int64_t step, size_t weight) {
  return {step, static_cast<int>(weight), 0, MessageKind::kTiedWeight};
}

// Number of the sum of squares among the run's collectives.
constexpr int kNormNumber = 1;

// The gradient of each expert, or the whole one.
std::vector<at::Tensor> by_expert(const Parameter& parameter) {
  return parameter.experts() > 0 ? parameter.grad.chunk(parameter.experts()) : std::vector<at::Tensor>{parameter.grad};
}

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

}  // namespace

RankUpdate::RankUpdate(Pipeline& pipeline, const WeightUses& uses, int rank, const OptimizerConfig& config,
                       const UpdateSettings& settings)
    : pipeline_(pipeline), uses_(uses), rank_(rank), settings_(settings) {
  std::vector<Optimizer::Item> items = trained_items();
  if (pipeline.world().replicas > 1) {
    if (config.shard) shard(config, items);
    sum_over_replicas();
  }
  if (config.average > 0) average_ = std::make_unique<WeightAverage>(config.average, items);
  if (shards_) std::erase_if(items, [&](const Optimizer::Item& item) { return !owns(item.parameter); });
  optimizer_ = std::make_unique<Optimizer>(config, items);
  for (const UsedWeight& weight : uses_.all) {
    for (const WeightUse& use : weight.uses) {
      if (weight.uses.size() > 1 && use.rank == rank_) tied_.insert(use.parameter);
    }
  }
}

RankUpdate::~RankUpdate() {
  pipeline_.rank(rank_).sum_gradients_with(nullptr);
}

std::vector<Optimizer::Item> RankUpdate::trained_items() {
  std::vector<Optimizer::Item> items;
  for (const UsedWeight& weight : uses_.all) {
    Parameter* here = weight.on(rank_);
    if (here == nullptr) continue;
    for (const WeightUse& use : weight.uses) {
      if (use.rank != rank_) continue;
      if (use.parameter != here) {
        if (!weight.shared) use.parameter->tie_to(*here);
        continue;
      }
      const bool hidden = std::ranges::all_of(weight.uses, &WeightUse::hidden);
      if (here->trainable()) items.push_back({here, use.stage, hidden});
    }
  }
  return items;
}

void RankUpdate::shard(const OptimizerConfig& config, const std::vector<Optimizer::Item>& items) {
  const ParameterGroups groups(config);
  std::vector<Parameter*> parameters;
  std::vector<UpdateCost> costs;
  for (const auto& [parameter, stage, in_hidden_layer] : items) {
    if (parameter->share().of > 1) continue;  // its holders keep all of its state
    const bool muon = groups.rule_of(*parameter, in_hidden_layer).muon;
    parameters.push_back(parameter);
    costs.push_back({parameter->numel(), muon ? muon_work(*parameter) : 0});
  }
  shards_ = std::make_unique<OptimizerShards>(*pipeline_.world().data[rank_], std::move(parameters), costs);
}

void RankUpdate::sum_over_replicas() {
  std::vector<GradientReducer::Item> items;
  for (const UsedWeight& weight : uses_.all) {
    const WeightUse& use = weight.uses.front();
    if (weight.uses.size() > 1 || use.rank != rank_ || !use.trainable) continue;
    const int layer = use.layer - pipeline_.stage(use.stage).first_layer();
    GradientReducer::Item item{use.parameter, use.stage, layer, pipeline_.model().layers[use.layer].name};
    const ExpertShare share = use.parameter->share();
    if (share.of > 1) {
      Transport& replicas = *pipeline_.world().data[rank_];
      std::vector<int> holders;
      for (int replica = share.index; replica < replicas.size(); replica += share.of) holders.push_back(replica);
      if (!holders_) holders_ = std::make_unique<Subgroup>(replicas, std::move(holders), Group::kReplicas);
    } else if (shards_) {
      item.owner = shards_->owner_of(use.parameter);
    }
    items.push_back(std::move(item));
  }
  reducer_ = std::make_unique<GradientReducer>(*pipeline_.world().data[rank_], std::move(items), settings_.bucket_bytes,
                                               pipeline_.world().device(rank_), holders_.get());
  pipeline_.rank(rank_).sum_gradients_with(reducer_.get());
}

void RankUpdate::apply(double lr, const std::vector<Parameter*>& complete) {
  TWOBP_CHECK(!settings_.depends_on_norm(scale_), "gradients are streamed, but their norm is needed");
  std::vector<Parameter*> now;
  std::vector<at::Tensor> grads;
  std::vector<const Parameter*> of;  // these
  for (Parameter* parameter : complete) {
    if (!parameter->trainable() || tied_.contains(parameter)) continue;
    if (shards_ && !owns(parameter)) {
      parameter->forget_grad();
      continue;
    }
    now.push_back(parameter);
    for (at::Tensor& grad : by_expert(*parameter)) {
      grads.push_back(std::move(grad));
      of.push_back(parameter);
    }
  }
  const std::vector<double> squares = sums_of_squares(grads);
  for (size_t i = 0; i < squares.size(); ++i) {
    applied_[of[i]].push_back(squares[i]);
    finite_ = finite_ && std::isfinite(squares[i]);
  }
  if (finite_) {
    optimizer_->step_early(now, lr);
  } else {  // the step fails
    for (Parameter* parameter : now) parameter->forget_grad();
  }
}

std::vector<Waited> RankUpdate::run(int64_t step, double lr, UpdateResult& result) {
  waits_.clear();
  sum_and_take(step, lr, result);
  hand_on_shared(step);
  return std::exchange(waits_, {});
}

void RankUpdate::sum_and_take(int64_t step, double lr, UpdateResult& result) {
  send_tied(step);
  if (reducer_) {
    reducer_->finish(patience());
    if (const std::vector<Parameter*> rest = reducer_->take_summed(); !rest.empty()) apply(lr, rest);
  }
  sum_tied(step);
  sum_others();
  at::Tensor squares = sum_squares();
  const bool depends = settings_.depends_on_norm(scale_);
  const bool finite = all_finite(squares);
  drop_uncounted(squares);
  if (!depends || result.may_presume) {
    // Processes sum them at the end of the step. The ranks of this process write to different weights.
    for (int64_t place = 0; place < squares.numel(); ++place) {
      const double sum = squares.const_data_ptr<double>()[place];
      if (sum != 0) result.squares.mutable_data_ptr<double>()[place] = sum;
    }
  }
  if (!depends) {
    // The replicas of a rank skip a step together. Besides, those that shared its gradients have then read this one's.
    if (shards_) sum_on_the_way(*pipeline_.world().data[rank_], squares, patience(), WaitCause::kNorm);
    return take(step, lr, finite && all_finite(squares) ? std::optional<double>(1) : std::nullopt);
  }
  Exchange norm(*pipeline_.world().run[rank_], squares, kNormNumber, WaitCause::kNorm);
  // All ranks decide alike: if the step is wrong, all drop what a rank sent before it settled.
  if (result.may_presume && before_ && as_presumed_) {
    norm.ready();  // a rank without others below it sends what it has
    return leave_open({step, lr, squares, std::move(norm)});
  }
  wait_for(norm, patience());
  if (!result.may_presume && rank_ == pipeline_.world().local_ranks().front()) result.squares.copy_(squares);
  const std::optional<double> factor = factor_for(squares);
  as_presumed_ = factor == 1 / scale_.value;
  take(step, lr, factor);
}

// Every rank that updates the weight gets every use's gradient, and adds them in the same order.
void RankUpdate::send_tied(int64_t step) {
  Transport& transport = pipeline_.rank(rank_).transport();
  for (size_t w = 0; w < uses_.all.size(); ++w) {
    const UsedWeight& weight = uses_.all[w];
    std::set<int> ranks = weight.ranks_of_tied(rank_);
    if (weight.shared && !ranks.empty()) ranks = {weight.uses.front().rank};
    ranks.erase(rank_);
    for (size_t u = 0; u < weight.uses.size() && !ranks.empty(); ++u) {
      if (weight.uses[u].rank != rank_) continue;
      at::Tensor grad = weight.uses[u].parameter->grad_to_add();
      // This rank may overwrite it at once, unless it waits for the shared weight.
      if (!weight.shared) grad = grad.clone();
      for (const int to : ranks) transport.isend(to, tied_tag(step, w, static_cast<int>(u)), {grad});
    }
  }
}

void RankUpdate::sum_tied(int64_t step) {
  for (size_t w = 0; w < uses_.all.size(); ++w) {
    const UsedWeight& weight = uses_.all[w];
    if (weight.ranks_of_tied(rank_).empty()) continue;
    Parameter* own = weight.on(rank_);
    if (own != nullptr && own->shares_grad()) {
      const WeightUse& other = weight.uses[1];
      if (other.rank == rank_) {
        other.parameter->grad_to_add();
        other.parameter->forget_grad();
      } else {
        MessageWait added(pipeline_.rank(rank_).transport(), other.rank, tied_tag(step, w, 1));
        wait_for(added, patience());
      }
      const MemoryMeter::Scope scope(weight.uses.front().stage, MemoryCategory::kGradients);
      own->join_grad();
      continue;
    }
    const at::Tensor sum = own != nullptr ? sum_of_uses(step, w) : at::Tensor();
    for (const WeightUse& use : weight.uses) {
      if (use.rank == rank_) use.parameter->forget_grad();
    }
    if (own == nullptr) continue;
    own->mark_grad_written();
    if (!sum.is_same(own->grad)) own->grad.copy_(sum);
  }
}

at::Tensor RankUpdate::sum_of_uses(int64_t step, size_t weight) {
  Transport& transport = pipeline_.rank(rank_).transport();
  at::Tensor sum;
  for (size_t u = 0; u < uses_.all[weight].uses.size(); ++u) {
    const WeightUse& use = uses_.all[weight].uses[u];
    at::Tensor grad;
    if (use.rank == rank_) {
      grad = use.parameter->grad_to_add();
    } else {
      MessageWait there(transport, use.rank, tied_tag(step, weight, static_cast<int>(u)));
      wait_for(there, patience());
      grad = there.values[0];
    }
    // The gradient of this rank may be overwritten, but no message.
    const bool overwrites = uses_.all[weight].uses.front().rank == rank_;
    sum = !sum.defined() ? grad : overwrites ? sum.add_(grad) : sum + grad;
  }
  return sum;
}

void RankUpdate::hand_on_shared(int64_t step) {
  Transport& transport = pipeline_.rank(rank_).transport();
  for (size_t w = 0; w < uses_.all.size(); ++w) {
    const UsedWeight& weight = uses_.all[w];
    if (!weight.shared) continue;
    const int updates = weight.uses.front().rank;
    const std::set<int> ranks = weight.ranks_of_tied(rank_);  // empty: frozen, or not here
    if (!ranks.empty() && rank_ != updates) {
      MessageWait updated(transport, updates, updated_tag(step, w));
      wait_for(updated, patience());
      continue;
    }
    for (const int to : ranks) {
      if (to != rank_) transport.isend(to, updated_tag(step, w), {});
    }
  }
}

void RankUpdate::sum_others() {
  if (!reducer_) return;
  Transport& replicas = *pipeline_.world().data[rank_];
  for (const UsedWeight& weight : uses_.all) {
    Parameter* parameter = weight.on(rank_);
    if (parameter == nullptr) continue;
    if (!weight.ranks_of_tied(rank_).empty()) all_reduce_sum(replicas, parameter->grad_to_add(), patience());
    if (parameter->is_buffer()) {  // every replica has changed it in its own way
      all_reduce_sum(replicas, parameter->value, patience());
      if (parameter->value.is_floating_point()) {
        parameter->value.div_(replicas.size());
      } else {
        parameter->value.div_(replicas.size(), "floor");
      }
    }
  }
}

void RankUpdate::drop_uncounted(at::Tensor& squares) const {
  const int replica = pipeline_.world().replica;
  for (const UsedWeight& weight : uses_.all) {
    const Parameter* parameter = weight.on(rank_);
    const int holders = parameter == nullptr ? 1 : parameter->share().of;
    // Without shards, the first replicas that have all experts among them.
    if (holders > 1 ? replica >= holders : !shards_ && replica > 0)
      squares.narrow(0, weight.first_place, weight.places).zero_();
  }
}

bool RankUpdate::owns(const Parameter* parameter) const {
  return parameter->share().of > 1 || shards_->owns(parameter);
}

at::Tensor RankUpdate::sum_squares() {
  std::vector<at::Tensor> grads;
  std::vector<int64_t> places;
  at::Tensor squares = at::zeros({uses_.places}, at::kDouble);
  auto* const by_place = squares.mutable_data_ptr<double>();
  for (const UsedWeight& weight : uses_.all) {
    const Parameter* parameter = weight.on(rank_);
    if (parameter == nullptr || weight.uses.front().rank != rank_ || !parameter->trainable()) continue;
    int64_t place = weight.first_place + parameter->experts() * parameter->share().index;
    if (const auto applied = applied_.find(parameter); applied != applied_.end()) {
      for (const double sum : applied->second) by_place[place++] = sum;
    } else if (shards_ ? owns(parameter) : parameter->has_grad()) {
      for (at::Tensor& grad : by_expert(*parameter)) {
        grads.push_back(std::move(grad));
        places.push_back(place++);
      }
    }
  }
  const std::vector<double> sums = sums_of_squares(grads);
  for (size_t i = 0; i < sums.size(); ++i) by_place[places[i]] = sums[i];
  applied_.clear();
  finite_ = true;
  return squares;
}

std::optional<double> RankUpdate::factor_for(const at::Tensor& squares) const {
  if (!all_finite(squares)) return std::nullopt;
  const double norm = norm_of(uses_.by_layer(squares)) / scale_.value;
  return (settings_.clip_norm > 0 ? std::min(1.0, settings_.clip_norm / (norm + 1e-6)) : 1) / scale_.value;
}

void RankUpdate::take(int64_t step, double lr, std::optional<double> factor) {
  scale_.adapt(!factor);
  if (!factor) {
    optimizer_->skip();
    if (shards_) shards_->forget_gradients();
    return;
  }
  optimizer_->step(lr, *factor);
  if (shards_) {
    shards_->send(step);
    shards_->receive(step, patience());
  }
  add_to_average();
}

void RankUpdate::add_to_average() {
  if (average_) average_->add(optimizer_->steps());
}

void RankUpdate::swap_average() {
  average_->swap();
}

void RankUpdate::make_savepoint(bool float16) {
  if (shards_) return;
  before_ = std::make_unique<Savepoint>();
  optimizer_->add_to(*before_, /*gradients=*/float16);
  if (average_) average_->add_to(*before_);
  for (const UsedWeight& weight : uses_.all) {  // the next step's F may change it before settle()
    const Parameter* parameter = weight.on(rank_);
    if (parameter != nullptr && parameter->is_buffer()) before_->add(parameter->value, weight.uses.front().stage);
  }
}

void RankUpdate::leave_open(OpenStep step) {
  optimizer_->complete_gradients();
  before_->save();
  optimizer_->step(step.lr, 1 / scale_.value);
  add_to_average();
  open_ = std::move(step);
}

Settled RankUpdate::settle() {
  if (!open_) return {true, scale_.value};
  OpenStep open = std::move(*open_);
  open_.reset();
  wait_for(open.norm, patience());
  const std::optional<double> factor = factor_for(open.squares);
  as_presumed_ = factor == 1 / scale_.value;
  if (as_presumed_) {
    scale_.adapt(false);
  } else {
    before_->roll_back();
    optimizer_->undo();
    ++taken_back_;
    take(open.step, open.lr, factor);
  }
  return {as_presumed_, scale_.value};
}

void RankUpdate::fail_not_finite(const at::Tensor& squares, int64_t step) {
  at::Tensor bad_weights = at::zeros_like(squares);
  for (const UsedWeight& weight : uses_.all) {
    for (const WeightUse& use : weight.uses) {
      if (use.rank == rank_ && !at::isfinite(use.parameter->value).all().item<bool>()) {
        bad_weights.mutable_data_ptr<double>()[use.layer] = 1;
      }
    }
  }
  sum_on_the_way(pipeline_.rank(rank_).transport(), bad_weights, settings_.timeout);
  const auto& layers = pipeline_.model().layers;
  for (int64_t layer = 0; layer < squares.numel(); ++layer) {
    TWOBP_CHECK(bad_weights.const_data_ptr<double>()[layer] == 0, "a weight of layer ", layers[layer].name,
                " is not finite in step ", step, ": lower optimizer.lr, set train.clip_norm, or look at the data");
  }
  int64_t last = squares.numel() - 1;
  while (last > 0 && std::isfinite(squares.const_data_ptr<double>()[last])) --last;
  fail("the gradient of layer ", layers[last].name, " is not finite in step ", step,
       ": lower optimizer.lr, set train.clip_norm, or look at the data");
}

std::vector<Optimizer::State> RankUpdate::state() const {
  std::vector<Optimizer::State> states = optimizer_->state();
  if (average_) {
    for (Optimizer::State& mean : average_->state()) states.push_back(std::move(mean));
  }
  return states;
}

void RankUpdate::restored(int64_t optimizer_steps) {
  optimizer_->set_steps(optimizer_steps);
  for (const UsedWeight& weight : uses_.all) {
    for (const WeightUse& use : weight.uses) {
      if (use.rank == rank_ && (!weight.shared || &use == &weight.uses.front())) use.parameter->refresh_value();
    }
  }
}

}  // namespace twobp
