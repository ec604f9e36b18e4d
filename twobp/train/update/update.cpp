#include "twobp/train/update/update.h"

#include <algorithm>
#include <exception>
#include <map>
#include <set>

#include "twobp/pipeline/memory/memory_meter.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/train/checkpoint/checkpoint_format.h"
#include "twobp/train/update/optimizer.h"
#include "twobp/train/update/rank_update.h"
#include "twobp/train/update/square_sums.h"
#include "twobp/transport/collectives.h"
#include "twobp/transport/world.h"

namespace twobp {

namespace {

// The parts of a parameter's state, or the pieces of them that this replica has, by their names in a checkpoint.
NamedTensors parts_of(const Optimizer::State& state) {
  const Parameter& parameter = *state.item.parameter;
  NamedTensors all;
  if (state.item.whole()) {
    for (auto& [part, rows] : parameter.parts_of(state.tensor)) all.emplace_back(part + "." + state.name, rows);
    return all;
  }
  const auto& [begin, end] = std::pair(state.item.begin, state.item.end);
  const int64_t row = parameter.numel() / parameter.sizes()[0];
  int64_t first = 0;
  for (const ParameterPart& part : parameter.parts()) {
    const int64_t numbers = parameter.parts().size() == 1 ? parameter.numel() : part.rows * row;
    const int64_t from = std::max(begin, first), to = std::min(end, first + numbers);
    at::Tensor piece = from < to ? state.tensor.narrow(0, from - begin, to - from) : at::Tensor();
    const bool whole = to - from == numbers;
    if (piece.defined() && (whole || !parameter.master.is_contiguous())) {  // whole rows, in the order of their indices
      std::vector<int64_t> sizes = parameter.sizes();
      sizes[0] = (to - from) / row;
      piece = piece.as_strided(sizes, parameter.master.strides());
    }
    const PieceName name{part.name + "." + state.name, from - first, whole ? -1 : to - first};
    if (piece.defined()) all.emplace_back(to_string(name), piece);
    first += numbers;
  }
  return all;
}

}  // namespace

Update::Update(Pipeline& pipeline, const OptimizerConfig& config, double clip_norm, double timeout,
               int64_t bucket_bytes)
    : pipeline_(pipeline),
      settings_{clip_norm, timeout, bucket_bytes},
      uses_(pipeline),
      ranks_(pipeline.ranks()),
      averages_(config.average > 0),
      shards_(config.shard && pipeline.world().replicas > 1) {
  ParameterGroups(config).check(uses_.names);
  pipeline.on_ranks(
      [&](int rank) { ranks_[rank] = std::make_unique<RankUpdate>(pipeline_, uses_, rank, config, settings_); });
}

Update::~Update() = default;

RankUpdate& Update::first_rank() const {
  return *ranks_[pipeline_.world().local_ranks().front()];
}

bool Update::ties_ranks() const {
  return std::ranges::any_of(
      uses_.all, [](const UsedWeight& weight) { return weight.ranks_of_tied(weight.uses.front().rank).size() > 1; });
}

void Update::make_savepoints(bool float16) {
  if (pipeline_.ranks() == 1) return;  // a single rank has the norm at once
  // A rank that takes a step back would change weights while others compute with them.
  if (std::ranges::any_of(uses_.all, &UsedWeight::shared)) return;
  pipeline_.on_ranks([&](int rank) { ranks_[rank]->make_savepoint(float16); });
}

void Update::gradients_are_streamed() {
  pipeline_.on_ranks([&](int rank) { ranks_[rank]->renew_sums(); });
  pipeline_.meter().reset_peaks();  // whole gradients were held until here, and are gone
}

void Update::show_gradients_to(const std::shared_ptr<Observer>& observer) {
  pipeline_.on_ranks([&](int rank) { ranks_[rank]->show_gradients_to(observer); });
}

void Update::use(const LossScale& scale) {
  for (const int rank : pipeline_.world().local_ranks()) ranks_[rank]->use(scale);
}

UpdateResult Update::begin(bool may_presume) const {
  UpdateResult result;
  result.squares = square_sums(uses_.layers);
  result.may_presume = may_presume;
  return result;
}

std::vector<Waited> Update::run(int rank, int64_t step, double lr, UpdateResult& result) {
  return ranks_[rank]->run(step, lr, result);
}

Settled Update::settle(int rank) {
  return ranks_[rank]->settle();
}

void Update::settle_all() {
  const auto& here = pipeline_.world().local_ranks();
  if (std::ranges::none_of(here, [&](int rank) { return ranks_[rank]->is_open(); })) return;
  pipeline_.on_ranks([&](int rank) { settle(rank); });
}

int64_t Update::taken_back() const {
  int64_t count = 0;
  for (const int rank : pipeline_.world().local_ranks()) count += ranks_[rank]->taken_back();
  return count;
}

std::vector<at::Tensor> Update::to_sum(const LossScale& scale, UpdateResult& result) const {
  if (settings_.depends_on_norm(scale) && !result.may_presume) return {};
  return {result.squares.view({-1})};
}

void Update::finish(int64_t step, const LossScale& scale, UpdateResult& result) {
  const MemoryMeter::Watch watch(pipeline_.meter());
  const std::vector<double> squares = values_of(result.squares);
  result.grad_norm = norm_of(squares) / scale.value;
  const bool finite = all_finite(squares);
  result.skipped = !finite && scale.adapts;
  if (!finite && !result.skipped) {
    pipeline_.on_ranks([&](int rank) { ranks_[rank]->fail_not_finite(squares, step); });
  }
}

void Update::swap_averages() {
  if (!averages_ || optimizer_steps() == 0) return;
  if (shards_) {  // other replicas may still read the weights that this one has sent
    const MemoryMeter::Watch watch(pipeline_.meter());
    barrier(*pipeline_.world().processes, settings_.timeout);
  }
  pipeline_.on_ranks([&](int rank) { ranks_[rank]->swap_average(); });
}

void Update::with_masters(const std::function<void()>& body) {
  if (!shards_) return body();
  pipeline_.on_ranks([&](int rank) { ranks_[rank]->take_masters(); });
  try {
    body();
  } catch (...) {
    const std::exception_ptr reason = std::current_exception();
    try {
      pipeline_.on_ranks([&](int rank) { ranks_[rank]->give_masters_back(/*all_have_them=*/false); });
    } catch (const std::exception&) {
      // The pipeline has failed and cannot be used again. Why, `reason` says.
    }
    std::rethrow_exception(reason);
  }
  pipeline_.on_ranks([&](int rank) { ranks_[rank]->give_masters_back(/*all_have_them=*/true); });
}

std::vector<LiveTensor> Update::live_weights() const {
  std::vector<LiveTensor> all;
  for (const UsedWeight& weight : uses_.all) {
    std::set<int> seen;  // uses on one rank share their weight
    for (const WeightUse& use : weight.uses) {
      if (weight.shared && !seen.empty()) break;
      if (!seen.insert(use.rank).second || use.parameter == nullptr) continue;
      const Parameter& one = *use.parameter;
      const bool frozen = !one.trainable() && !one.is_buffer() && !one.is_corrected();
      for (auto& [name, rows] : use.parameter->parts_of(use.parameter->master)) {
        all.push_back({std::move(name), std::move(rows), use.rank, seen.size() == 1, frozen});
      }
    }
  }
  return all;
}

std::vector<LiveTensor> Update::live_optimizer_state() const {
  std::map<const Parameter*, int> first_rank;  // by parameter: the first rank that has the weight
  for (const UsedWeight& weight : uses_.all) {
    int lowest = weight.uses.front().rank;
    for (const WeightUse& use : weight.uses) lowest = weight.shared ? lowest : std::min(lowest, use.rank);
    for (const WeightUse& use : weight.uses) first_rank[use.parameter] = lowest;
  }
  std::vector<LiveTensor> all;
  for (const int rank : pipeline_.world().local_ranks()) {
    for (const Optimizer::State& state : ranks_[rank]->state()) {
      const bool first = rank == first_rank.at(state.item.parameter);
      for (auto& [part, tensor] : parts_of(state)) all.push_back({part, std::move(tensor), rank, first, false});
    }
  }
  return all;
}

WeightAverage::WeightAverage(double decay, const std::vector<Optimizer::Item>& items) : decay_(decay), items_(items) {
  for (const Optimizer::Item& item : items_) {
    const MemoryMeter::Scope scope(item.stage, MemoryCategory::kOptimizer);
    means_.push_back(at::zeros_like(item.master()));
  }
}

void WeightAverage::add(int64_t step) {
  for (size_t i = 0; i < means_.size(); ++i) {
    const at::Tensor weights = items_[i].master();
    step == 1 ? means_[i].copy_(weights) : means_[i].lerp_(weights, 1 - decay_);
  }
}

void WeightAverage::swap() {
  for (size_t i = 0; i < means_.size(); ++i) {
    const at::Tensor live = items_[i].master();
    const at::Tensor weights = live.clone();
    live.copy_(means_[i]);
    means_[i].copy_(weights);
    if (items_[i].whole()) items_[i].parameter->refresh_value();
  }
}

void WeightAverage::add_to(Savepoint& savepoint) const {
  for (size_t i = 0; i < means_.size(); ++i) savepoint.add(means_[i], items_[i].stage);
}

std::vector<Optimizer::State> WeightAverage::state() const {
  std::vector<Optimizer::State> all;
  for (size_t i = 0; i < means_.size(); ++i) all.push_back({items_[i], "average", means_[i]});
  return all;
}

void Savepoint::add(const at::Tensor& live, int stage) {
  const MemoryMeter::Scope scope(stage, MemoryCategory::kOptimizer);
  entries_.push_back({live, at::empty_like(live)});
}

void Savepoint::save() {
  for (Entry& entry : entries_) entry.copy.copy_(entry.live);
}

void Savepoint::roll_back() const {
  for (const Entry& entry : entries_) entry.live.copy_(entry.copy);
}

}  // namespace twobp
