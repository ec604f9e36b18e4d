#include "twobp/train/update/rank_update.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/core/wait.h"
#include "twobp/nn/kernels/rows/row_arguments.h"
#include "twobp/pipeline/executor/rank_executor.h"
#include "twobp/pipeline/memory/memory_meter.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/stage.h"
#include "twobp/train/update/optimizer.h"
#include "twobp/train/update/square_sums.h"
#include "twobp/train/update/tied_sum.h"
#include "twobp/transport/message.h"
#include "twobp/transport/subgroup.h"
#include "twobp/transport/world.h"

namespace twobp {
namespace {

// The least bytes of a piece of a tied weight's gradient: each takes a message there and back.
constexpr int64_t kLeastPieceBytes = 1 << 20;

Tag updated_tag(int64_t step, size_t weight) {
  return {step, static_cast<int>(weight), 0, MessageKind::kTiedWeight};
}

// Number of the sum of squares among the run's collectives.
constexpr int kNormNumber = 1;

}  // namespace

RankUpdate::RankUpdate(Pipeline& pipeline, const WeightUses& uses, int rank, const OptimizerConfig& config,
                       const UpdateSettings& settings)
    : pipeline_(pipeline), uses_(uses), rank_(rank), settings_(settings) {
  std::vector<Optimizer::Item> items = trained_items();
  if (pipeline.world().replicas > 1) {
    if (config.shard) shard(config, items);
    sum_over_replicas();
  }
  if (shards_) keep_own(items);
  if (config.average > 0) average_ = std::make_unique<WeightAverage>(config.average, items);
  optimizer_ = std::make_unique<Optimizer>(config, items);
  for (const UsedWeight& weight : uses_.all) {
    for (const WeightUse& use : weight.uses) {
      if (weight.uses.size() > 1 && use.rank == rank_) tied_.insert(use.parameter);
      if (use.rank == rank_) layers_[use.parameter] = weight.uses.front().layer;
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
  std::set<const Parameter*> tied;
  for (const UsedWeight& weight : uses_.all) {
    for (const WeightUse& use : weight.uses) {
      if (weight.uses.size() > 1) tied.insert(use.parameter);
    }
  }
  for (const Optimizer::Item& item : items) {
    Parameter* const parameter = item.parameter;
    if (parameter->share().of > 1) continue;  // its holders keep all of its state
    const bool muon = groups.rule_of(*parameter, item.hidden).muon;
    parameters.push_back(parameter);
    // Squares are summed in blocks, of each expert apart. A part of channels-last memory has whole rows, so that a
    // checkpoint may hold it.
    const at::Tensor& master = parameter->master;
    const int64_t expert = parameter->numel() / std::max<int64_t>(parameter->experts(), 1);
    const bool by_expert = parameter->experts() > 0 && expert % kSquareBlock != 0;
    const int64_t unit =
        by_expert ? expert : std::lcm(kSquareBlock, master.is_contiguous() ? int64_t{1} : master.stride(0));
    costs.push_back({parameter->numel(), muon ? muon_work(*parameter) : 0, unit});
  }
  shards_ = std::make_unique<OptimizerShards>(*pipeline_.world().data[rank_], std::move(parameters), costs, tied);
}

void RankUpdate::keep_own(std::vector<Optimizer::Item>& items) const {
  for (Optimizer::Item& item : items) {
    if (item.parameter->share().of > 1) continue;
    const Cut* const cut = shards_->own(item.parameter);
    if (cut != nullptr && cut->end - cut->begin == item.parameter->numel()) continue;
    const MemoryMeter::Scope scope(item.stage, MemoryCategory::kParameters);
    item.kept = shards_->keep_own_master(*item.parameter);
    if (cut == nullptr) continue;
    item.begin = cut->begin;
    item.end = cut->end;
  }
  std::erase_if(items, [&](const Optimizer::Item& item) { return !owns(item.parameter); });
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
      item.cuts = shards_->cuts_of(use.parameter);
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
  for (Parameter* parameter : complete) {
    if (!parameter->trainable() || tied_.contains(parameter)) continue;
    applied_.insert(parameter);
    if (shards_ && !owns(parameter)) {
      parameter->forget_grad();
    } else {
      now.push_back(parameter);
    }
  }
  add_squares_of({now.begin(), now.end()});
  if (all_finite(values_of(squares_)) && all_finite(values_of(uncounted_))) {
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
  const std::vector<std::unique_ptr<TiedSum>> tied = begin_tied_sums(step);
  if (reducer_) {
    const auto apply_summed = [&] {
      if (reducer_->has_summed()) apply(lr, reducer_->take_summed());
    };
    reducer_->finish(patience(), [&] {
      apply_summed();
      if (reducer_->started() == reducer_->buckets().size())
        static_cast<void>(std::ranges::all_of(tied, &TiedSum::ready));
    });
    apply_summed();
  }
  for (const auto& sum : tied) wait_for(*sum, patience());
  average_buffers();
  at::Tensor squares;
  const bool finite = sum_squares(squares);
  const bool depends = settings_.depends_on_norm(scale_);
  if (!depends || result.may_presume) {
    // Processes sum them at the end of the step. The ranks of this process write to different layers.
    const double* const from = squares.const_data_ptr<double>();
    auto* const to = result.squares.mutable_data_ptr<double>();
    for (int64_t i = 0; i < squares.numel(); ++i) {
      if (from[i] != 0) to[i] = from[i];
    }
  }
  if (!depends) {
    // The replicas of a rank skip a step together. Besides, those that shared its gradients have then read this one's.
    if (shards_) sum_on_the_way(*pipeline_.world().data[rank_], squares, patience(), WaitCause::kNorm);
    return take(step, lr, finite && all_finite(values_of(squares)) ? std::optional<double>(1) : std::nullopt);
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

std::vector<std::unique_ptr<TiedSum>> RankUpdate::begin_tied_sums(int64_t step) {
  std::vector<std::unique_ptr<TiedSum>> sums;
  int first = reducer_ ? static_cast<int>(reducer_->buckets().size()) + 1 : 0;
  for (size_t w = 0; w < uses_.all.size(); ++w) {
    if (uses_.all[w].ranks_of_tied(rank_).empty()) continue;
    sums.push_back(std::make_unique<TiedSum>(
        uses_.all[w], TiedSum::Options{.ranks = pipeline_.rank(rank_).transport(),
                                       .replicas = reducer_ ? pipeline_.world().data[rank_].get() : nullptr,
                                       .step = step,
                                       .weight = static_cast<int>(w),
                                       .piece_bytes = std::max(settings_.bucket_bytes, kLeastPieceBytes),
                                       .first_sum = first}));
    first += static_cast<int>(sums.back()->pieces());
  }
  return sums;
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

void RankUpdate::average_buffers() {
  if (!reducer_) return;
  Transport& replicas = *pipeline_.world().data[rank_];
  for (const UsedWeight& weight : uses_.all) {
    Parameter* parameter = weight.on(rank_);
    if (parameter == nullptr || !parameter->is_buffer()) continue;
    all_reduce_sum(replicas, parameter->value, patience());
    if (parameter->counts_tokens()) continue;
    if (parameter->value.is_floating_point()) {
      parameter->value.div_(replicas.size());
    } else {
      parameter->value.div_(replicas.size(), "floor");
    }
  }
}

bool RankUpdate::owns(const Parameter* parameter) const {
  return parameter->share().of > 1 || shards_->own(parameter) != nullptr;
}

// Without shards, all replicas have the same squares, or the replicas that hold the same experts. The first count.
bool RankUpdate::counts(const Parameter& parameter) const {
  const int holders = parameter.share().of;
  const int replica = pipeline_.world().replica;
  return holders > 1 ? replica < holders : shards_ || replica == 0;
}

at::Tensor RankUpdate::own_gradient(const Parameter& parameter) const {
  const Cut* const cut = shards_ && parameter.share().of == 1 ? shards_->own(&parameter) : nullptr;
  const bool whole = cut == nullptr || cut->end - cut->begin == parameter.numel();
  return whole ? parameter.grad : numbers_between(parameter.grad, cut->begin, cut->end);
}

std::vector<at::Tensor> RankUpdate::own_gradients(const Parameter& parameter) const {
  const at::Tensor own = own_gradient(parameter);
  if (parameter.experts() == 0) return {own};
  const int64_t numbers = parameter.numel() / parameter.experts();  // of each, whose blocks begin with it
  if (numbers % kSquareBlock == 0) return {own};
  std::vector<at::Tensor> all;
  for (int64_t begin = 0; begin < own.numel(); begin += numbers)
    all.push_back(numbers_between(own, begin, std::min(begin + numbers, own.numel())));
  return all;
}

void RankUpdate::add_squares_of(const std::vector<const Parameter*>& parameters) {
  std::vector<at::Tensor> grads[2];
  std::vector<int64_t> layers[2];
  for (const Parameter* parameter : parameters) {
    const auto to = static_cast<size_t>(counts(*parameter));
    for (at::Tensor& grad : own_gradients(*parameter)) {
      grads[to].push_back(std::move(grad));
      layers[to].push_back(layers_.at(parameter));
    }
    show(*parameter);
  }
  if (!squares_.defined()) {
    squares_ = square_sums(uses_.layers);
    uncounted_ = square_sums(uses_.layers);
  }
  add_squares(grads[0], layers[0], uncounted_);
  add_squares(grads[1], layers[1], squares_);
}

void RankUpdate::show(const Parameter& parameter) const {
  for (const std::shared_ptr<Observer>& observer : observers_) {
    const at::Tensor gradient = own_gradient(parameter).alias();  // which nobody else has
    observer->on_gradient(parameter, gradient);
    TWOBP_CHECK(gradient.use_count() == 1, "an observer keeps the gradient of ", parameter.name(),
                ", whose memory is used again: keep a copy of it");
  }
}

bool RankUpdate::sum_squares(at::Tensor& squares) {
  std::vector<const Parameter*> rest;
  for (const UsedWeight& weight : uses_.all) {
    const Parameter* parameter = weight.on(rank_);
    if (parameter == nullptr || weight.uses.front().rank != rank_ || !parameter->trainable()) continue;
    if (!applied_.contains(parameter) && (shards_ ? owns(parameter) : parameter->has_grad())) rest.push_back(parameter);
  }
  add_squares_of(rest);
  applied_.clear();
  squares = std::exchange(squares_, {});
  return all_finite(values_of(squares)) && all_finite(values_of(uncounted_));
}

std::optional<double> RankUpdate::factor_for(const at::Tensor& squares) const {
  const std::vector<double> by_layer = values_of(squares);
  if (!all_finite(by_layer)) return std::nullopt;
  const double norm = norm_of(by_layer) / scale_.value;
  return (settings_.clip_norm > 0 ? std::min(1.0, settings_.clip_norm / (norm + 1e-6)) : 1) / scale_.value;
}

void RankUpdate::take(int64_t step, double lr, std::optional<double> factor) {
  scale_.adapt(!factor);
  if (!factor) {
    optimizer_->skip();
    balance_experts(/*taken=*/false);
    if (shards_) shards_->forget_gradients();
    return;
  }
  optimizer_->step(lr, *factor);
  if (shards_) {
    shards_->send(step);
    shards_->receive(step, patience());
  }
  add_to_average();
  balance_experts(/*taken=*/true);
}

void RankUpdate::add_to_average() {
  if (average_) average_->add(optimizer_->steps());
}

void RankUpdate::balance_experts(bool taken) {
  for (const UsedWeight& weight : uses_.all) {
    Parameter* parameter = weight.on(rank_);
    if (parameter != nullptr && parameter->counts_tokens()) taken ? parameter->balance() : parameter->forget_tokens();
  }
}

void RankUpdate::swap_average() {
  average_->swap();
  if (shards_) shards_->refresh_values(patience());
}

void RankUpdate::take_masters() {
  shards_->take_masters(patience());
}

void RankUpdate::give_masters_back(bool all_have_them) {
  shards_->give_masters_back(all_have_them ? std::optional(patience()) : std::nullopt);
}

void RankUpdate::make_savepoint(bool float16) {
  if (shards_) return;
  before_ = std::make_unique<Savepoint>();
  optimizer_->add_to(*before_, /*gradients=*/float16);
  if (average_) average_->add_to(*before_);
  for (const UsedWeight& weight : uses_.all) {  // the next step's F may change it before settle()
    const Parameter* parameter = weight.on(rank_);
    if (parameter != nullptr && (parameter->is_buffer() || parameter->is_corrected()))
      before_->add(parameter->value, weight.uses.front().stage);
  }
}

void RankUpdate::leave_open(OpenStep step) {
  optimizer_->complete_gradients();
  before_->save();
  optimizer_->step(step.lr, 1 / scale_.value);
  add_to_average();
  balance_experts(/*taken=*/true);
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

std::string advice_if_not_finite(const Pipeline& pipeline) {
  if (!pipeline.streams_gradients()) return "lower optimizer.lr, set train.clip_norm, or look at the data";
  return "streamed gradients have changed some weights, so continue from a checkpoint: lower optimizer.lr, look at the "
         "data, or set pipeline.gradients to \"kept\" and train.clip_norm";
}

void RankUpdate::fail_not_finite(const std::vector<double>& squares, int64_t step) {
  const auto count = static_cast<int64_t>(squares.size());
  at::Tensor bad_weights = at::zeros({count}, at::TensorOptions().dtype(at::kDouble));
  for (const UsedWeight& weight : uses_.all) {
    for (const WeightUse& use : weight.uses) {
      if (use.rank == rank_ && !at::isfinite(use.parameter->value).all().item<bool>()) {
        bad_weights.mutable_data_ptr<double>()[use.layer] = 1;
      }
    }
  }
  sum_on_the_way(pipeline_.rank(rank_).transport(), bad_weights, settings_.timeout);
  const auto& layers = pipeline_.model().layers;
  for (int64_t layer = 0; layer < count; ++layer) {
    TWOBP_CHECK(bad_weights.const_data_ptr<double>()[layer] == 0, "a weight of layer ", layers[layer].name,
                " is not finite in step ", step, ": ", advice_if_not_finite(pipeline_));
  }
  int64_t last = count - 1;
  while (last > 0 && std::isfinite(squares[last])) --last;
  fail("the gradient of layer ", layers[last].name, " is not finite in step ", step, ": ",
       advice_if_not_finite(pipeline_));
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
