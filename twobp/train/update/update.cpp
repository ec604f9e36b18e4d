#include "twobp/train/update/update.h"

#include <algorithm>
#include <map>
#include <set>

#include "twobp/core/check.h"
#include "twobp/core/clock.h"
#include "twobp/nn/device/device.h"
#include "twobp/pipeline/executor/rank_executor.h"
#include "twobp/pipeline/memory/memory_meter.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/stage.h"
#include "twobp/schedule/schedule_source.h"
#include "twobp/train/update/parameter_groups.h"
#include "twobp/transport/collectives.h"
#include "twobp/transport/world.h"

namespace twobp {
namespace {

Tag tied_tag(int64_t step, size_t weight, int use) {
  return {step, static_cast<int>(weight), use, MessageKind::kTiedGradient};
}

}  // namespace

Update::Update(Pipeline& pipeline, const OptimizerConfig& config, double clip_norm, double timeout,
               int64_t bucket_bytes)
    : pipeline_(pipeline), clip_norm_(clip_norm), timeout_(timeout) {
  first_rank_ = pipeline.world().local_ranks().front();
  ParameterGroups(config).check(find_weights());
  optimizers_.resize(pipeline.ranks());
  averages_.resize(pipeline.ranks());
  reducers_.resize(pipeline.ranks());
  shards_.resize(pipeline.ranks());
  states_.resize(pipeline.ranks());
  pipeline.on_ranks([&](int rank) {
    std::vector<Optimizer::Item> items = trained_items(rank);
    if (pipeline.world().replicas > 1) {
      if (config.shard) shard(rank, config, items);
      sum_over_replicas(rank, bucket_bytes);
    }
    make_optimizer(rank, config, std::move(items));
  });
}

Update::~Update() {
  for (const int rank : pipeline_.world().local_ranks()) pipeline_.rank(rank).sum_gradients_with(nullptr);
}

void Update::sum_over_replicas(int rank, int64_t bucket_bytes) {
  std::vector<GradientReducer::Item> items;
  for (const Uses& uses : all_) {
    const Use& use = uses.front();
    if (uses.size() > 1 || use.rank != rank || !use.trainable) continue;
    const int layer = use.layer - pipeline_.stage(use.stage).first_layer();
    GradientReducer::Item item{use.parameter, use.stage, layer, pipeline_.model().layers[use.layer].name};
    if (shards_[rank]) item.owner = shards_[rank]->owner_of(use.parameter);
    items.push_back(std::move(item));
  }
  reducers_[rank] = std::make_unique<GradientReducer>(*pipeline_.world().data[rank], std::move(items),
                                                      bucket_bytes, pipeline_.world().device(rank));
  pipeline_.rank(rank).sum_gradients_with(reducers_[rank].get());
}

std::vector<Optimizer::Item> Update::trained_items(int rank) {
  std::vector<Optimizer::Item> items;
  for (Uses& uses : all_) {
    Parameter* here = nullptr;
    for (const Use& use : uses) {
      if (use.rank != rank) continue;
      if (here == nullptr) {
        here = use.parameter;
        const bool hidden = std::all_of(uses.begin(), uses.end(), [](const Use& one) { return one.hidden; });
        if (here->trainable()) items.push_back({here, use.stage, hidden});
      } else {
        use.parameter->value = here->value;
        use.parameter->master = here->master;
      }
    }
  }
  return items;
}

void Update::shard(int rank, const OptimizerConfig& config, const std::vector<Optimizer::Item>& items) {
  const ParameterGroups groups(config);
  std::vector<Parameter*> parameters;
  std::vector<UpdateCost> costs;
  for (const auto& [parameter, stage, in_hidden_layer] : items) {
    const bool muon = groups.rule_of(*parameter, in_hidden_layer).muon;
    parameters.push_back(parameter);
    costs.push_back({parameter->numel(), muon ? muon_work(*parameter) : 0});
  }
  shards_[rank] =
      std::make_unique<OptimizerShards>(*pipeline_.world().data[rank], std::move(parameters), costs);
}

void Update::make_optimizer(int rank, const OptimizerConfig& config, std::vector<Optimizer::Item> items) {
  if (config.average > 0) averages_[rank] = std::make_unique<WeightAverage>(config.average, items);
  if (const auto& shards = shards_[rank]) {
    std::erase_if(items, [&](const Optimizer::Item& item) { return !shards->owns(item.parameter); });
  }
  optimizers_[rank] = std::make_unique<Optimizer>(config, items);
}

std::vector<std::string> Update::find_weights() {
  struct Known {
    size_t index = 0;
    std::vector<int64_t> sizes;
  };
  std::map<std::string, Known> known;
  std::vector<std::string> names;
  const std::string last = last_matrix(pipeline_.model());
  const auto& layers = pipeline_.model().layers;
  int layer = 0;
  for (int s = 0; s < pipeline_.stages(); ++s) {
    for (int i = 0; i < pipeline_.split()[s]; ++i, ++layer) {
      // For layers of other processes, the model's description is enough; making a layer allocates nothing.
      const bool local = pipeline_.has_stage(s);
      std::unique_ptr<Layer> described;
      std::vector<Parameter*> parameters;
      if (local) {
        parameters = pipeline_.stage(s).parameters(i);
      } else {
        described = layers[layer].make();
        parameters = parameters_of(*described);
      }
      for (Parameter* parameter : parameters) {
        const auto [at, is_new] =
            known.try_emplace(parameter->name(), Known{all_.size(), parameter->sizes()});
        if (is_new) {
          all_.emplace_back();
          numel_ += parameter->numel();
          for (const ParameterPart& part : parameter->parts()) names.push_back(part.name);
        }
        TWOBP_CHECK(parameter->sizes() == at->second.sizes, "tied parameter ", parameter->name(),
                    " has two shapes");
        Uses& uses = all_[at->second.index];
        const bool first_here =
            local && std::none_of(uses.begin(), uses.end(), [](const Use& use) { return use.parameter; });
        if (first_here) weights_.push_back(parameter);
        uses.push_back({local ? parameter : nullptr, layer, s, pipeline_.rank_of_stage()[s],
                        parameter->trainable(), in_hidden_layer(*parameter, last)});
      }
    }
  }
  return names;
}

void Update::swap_averages() {
  if (!averages_[first_rank_] || optimizer_steps() == 0) return;
  if (shards_[first_rank_]) {  // other replicas may still read the weights that this one has sent
    const MemoryMeter::Watch watch(pipeline_.meter());
    at::Tensor arrived = at::zeros({1});
    all_reduce_sum(*pipeline_.world().processes, arrived, timeout_);
  }
  pipeline_.on_ranks([&](int rank) { averages_[rank]->swap(); });
}

Parameter* Update::parameter_of(const Uses& uses, int rank) {
  const auto here = std::find_if(uses.begin(), uses.end(), [&](const Use& use) { return use.rank == rank; });
  return here == uses.end() ? nullptr : here->parameter;
}

std::set<int> Update::ranks_of_tied(const Uses& uses, int rank) {
  std::set<int> ranks;
  if (uses.size() < 2 || !uses.front().trainable) return ranks;
  for (const Use& use : uses) ranks.insert(use.rank);
  return ranks.contains(rank) ? ranks : std::set<int>();
}

bool Update::ties_ranks() const {
  return std::any_of(all_.begin(), all_.end(),
                     [](const Uses& uses) { return ranks_of_tied(uses, uses.front().rank).size() > 1; });
}

// Every rank that holds the weight gets every use's gradient, and adds them in the same order.
void Update::send_tied(int rank, int64_t step) {
  Transport& transport = pipeline_.rank(rank).transport();
  for (size_t w = 0; w < all_.size(); ++w) {
    Uses& uses = all_[w];
    const std::set<int> ranks = ranks_of_tied(uses, rank);
    if (ranks.empty()) continue;
    for (size_t u = 0; u < uses.size(); ++u) {
      if (uses[u].rank != rank) continue;
      for (const int to : ranks) {
        if (to != rank)
          transport.isend(to, tied_tag(step, w, static_cast<int>(u)),
                          {uses[u].parameter->grad_to_add().clone()});
      }
    }
  }
}

double Update::sum_tied(int rank, int64_t step) {
  double waited = 0;
  Transport& transport = pipeline_.rank(rank).transport();
  for (size_t w = 0; w < all_.size(); ++w) {
    Uses& uses = all_[w];
    if (ranks_of_tied(uses, rank).empty()) continue;
    at::Tensor sum;
    Parameter* first_here = nullptr;
    for (size_t u = 0; u < uses.size(); ++u) {
      at::Tensor grad;
      if (uses[u].rank == rank) {
        grad = uses[u].parameter->grad_to_add();
        if (first_here == nullptr) first_here = uses[u].parameter;
        uses[u].parameter->forget_grad();
      } else {
        const double begin = now_seconds();
        grad = transport.receive(uses[u].rank, tied_tag(step, w, static_cast<int>(u)), timeout_)[0];
        waited += waited_since(rank, begin);
      }
      sum = sum.defined() ? sum + grad : grad;
    }
    first_here->grad_to_add();
    first_here->grad.copy_(sum);
  }
  return waited;
}

double Update::waited_since(int rank, double begin) {
  const double end = now_seconds();
  pipeline_.rank(rank).waited_in_finish(begin, end);
  return end - begin;
}

double Update::sum_buckets(int rank) {
  if (!reducers_[rank]) return 0;
  const double begin = now_seconds();
  reducers_[rank]->finish(timeout_);
  const double waited = waited_since(rank, begin);
  pipeline_.rank(rank).exposed_in_finish(waited);
  return waited;
}

double Update::sum_others(int rank) {
  if (!reducers_[rank]) return 0;
  Transport& replicas = *pipeline_.world().data[rank];
  const double begin = now_seconds();
  for (const Uses& uses : all_) {
    Parameter* parameter = parameter_of(uses, rank);
    if (parameter == nullptr) continue;
    if (!ranks_of_tied(uses, rank).empty()) all_reduce_sum(replicas, parameter->grad_to_add(), timeout_);
    if (parameter->is_buffer()) {  // every replica has changed it in its own way
      all_reduce_sum(replicas, parameter->value, timeout_);
      if (parameter->value.is_floating_point()) {
        parameter->value.div_(replicas.size());
      } else {
        parameter->value.div_(replicas.size(), "floor");
      }
    }
  }
  const double waited = waited_since(rank, begin);
  pipeline_.rank(rank).exposed_in_finish(waited);
  return waited;
}

double Update::receive_shards(int rank, int64_t step) {
  if (!shards_[rank]) return 0;
  const double begin = now_seconds();
  shards_[rank]->receive(step, timeout_);
  return waited_since(rank, begin);
}

}  // namespace twobp
