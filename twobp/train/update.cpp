#include "twobp/train/update.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "twobp/core/check.h"
#include "twobp/core/clock.h"
#include "twobp/nn/kernels/rows.h"
#include "twobp/transport/collectives.h"

namespace twobp {
namespace {

double sum_of_squares(const at::Tensor& grad) {
  double sum = 0;
  dispatch_float(grad.scalar_type(), "gradient norm", [&](auto zero) {
    using S = decltype(zero);
    sum = kernels<S>().sum_of_squares(numbers<S>(grad), grad.numel());
  });
  return sum;
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

// Messages of the update are told apart from the schedule's by a stage that none has.
Tag tied_tag(int64_t step, size_t weight, int use) {
  return {step, -1 - static_cast<int>(weight), use, Direction::kBackward};
}

}  // namespace

Update::Update(Pipeline& pipeline, const OptimizerConfig& config, double clip_norm, double timeout,
               int64_t bucket_bytes)
    : pipeline_(pipeline), clip_norm_(clip_norm), timeout_(timeout) {
  first_rank_ = pipeline.world().local_ranks().front();
  find_weights();
  optimizers_.resize(pipeline.ranks());
  reducers_.resize(pipeline.ranks());
  shards_.resize(pipeline.ranks());
  pipeline.on_ranks([&](int rank) {
    if (pipeline.world().replicas > 1) sum_over_replicas(rank, bucket_bytes);
    make_optimizer(rank, config);
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
    items.push_back({use.parameter, use.stage, layer, pipeline_.model().layers[use.layer].name});
  }
  reducers_[rank] =
      std::make_unique<GradientReducer>(*pipeline_.world().data[rank], std::move(items), bucket_bytes);
  pipeline_.rank(rank).sum_gradients_with(reducers_[rank].get());
}

void Update::make_optimizer(int rank, const OptimizerConfig& config) {
  std::vector<Optimizer::Item> items;
  for (Uses& uses : all_) {
    Parameter* here = nullptr;
    for (const Use& use : uses) {
      if (use.rank != rank) continue;
      if (here == nullptr) {
        here = use.parameter;
        if (here->trainable()) items.push_back({here, use.stage});
      } else {
        use.parameter->value = here->value;
        use.parameter->master = here->master;
      }
    }
  }
  if (config.shard && pipeline_.world().replicas > 1) {
    std::vector<Parameter*> parameters;
    for (const Optimizer::Item& item : items) parameters.push_back(item.parameter);
    shards_[rank] = std::make_unique<OptimizerShards>(*pipeline_.world().data[rank], std::move(parameters));
    std::vector<Optimizer::Item> own;
    for (size_t i = 0; i < items.size(); ++i) {
      if (shards_[rank]->owns(i)) own.push_back(items[i]);
    }
    items = std::move(own);
  }
  optimizers_[rank] = std::make_unique<Optimizer>(config, items);
}

void Update::find_weights() {
  struct Known {
    size_t index = 0;
    std::vector<int64_t> sizes;
  };
  std::map<std::string, Known> known;
  const auto& layers = pipeline_.model().layers;
  int layer = 0;
  for (int s = 0; s < pipeline_.stages(); ++s) {
    for (int i = 0; i < pipeline_.split()[s]; ++i, ++layer) {
      // What another process holds is known by the model's description; making a layer allocates nothing.
      const bool local = pipeline_.has_stage(s);
      std::unique_ptr<Layer> described;
      std::vector<Parameter*> parameters;
      if (local) {
        parameters = pipeline_.stage(s).parameters(i);
      } else {
        described = layers[layer].make();
        described->collect_parameters(parameters);
      }
      for (Parameter* parameter : parameters) {
        const auto [at, is_new] =
            known.try_emplace(parameter->name(), Known{all_.size(), parameter->sizes()});
        if (is_new) {
          all_.emplace_back();
          numel_ += parameter->numel();
        }
        TWOBP_CHECK(parameter->sizes() == at->second.sizes, "tied parameter ", parameter->name(),
                    " has two shapes");
        Uses& uses = all_[at->second.index];
        const bool first_here =
            local && std::none_of(uses.begin(), uses.end(), [](const Use& use) { return use.parameter; });
        if (first_here) weights_.push_back(parameter);
        uses.push_back(
            {local ? parameter : nullptr, layer, s, pipeline_.rank_of_stage()[s], parameter->trainable()});
      }
    }
  }
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

// Everyone who holds the weight gets every use's gradient, and adds them up in the same order.
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
    if (parameter->is_buffer()) {  // what every replica has changed in its own way
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
                " is not finite in step ", step, ": lower optimizer.lr, or set train.clip_norm");
  }
  int64_t last = squares.numel() - 1;
  while (last > 0 && std::isfinite(squares.const_data_ptr<double>()[last])) --last;
  fail("the gradient of layer ", layers[last].name, " is not finite in step ", step,
       ": lower optimizer.lr, set train.clip_norm, or look at the data");
}

UpdateResult Update::begin() const {
  UpdateResult result;
  result.squares = at::zeros({static_cast<int64_t>(pipeline_.model().layers.size())},
                             at::TensorOptions().dtype(at::kDouble));
  return result;
}

double Update::run(int rank, int64_t step, double lr, double gradient_scale, UpdateResult& result) {
  const double begin = now_seconds();
  send_tied(rank, step);
  double waited = sum_buckets(rank);
  waited += sum_tied(rank, step);
  waited += sum_others(rank);
  // One sum of squares per layer, those of other ranks zero: adding them over ranks changes no bit.
  at::Tensor squares = at::zeros_like(result.squares);
  bool finite = true;
  for (const Uses& uses : all_) {
    const Use& use = uses.front();
    if (use.rank != rank || !use.parameter->has_grad()) continue;
    const double sum = sum_of_squares(use.parameter->grad);
    finite = finite && std::isfinite(sum);
    squares.mutable_data_ptr<double>()[use.layer] += sum;
    result.squares.mutable_data_ptr<double>()[use.layer] += sum;  // this rank's alone
  }
  double factor = 1;
  if (waits_for_norm(gradient_scale)) {
    const double wait = now_seconds();
    all_reduce_sum(pipeline_.rank(rank).transport(), squares, timeout_);
    waited += waited_since(rank, wait);
    finite = all_finite(squares);
    const double norm = norm_of(squares) / gradient_scale;
    factor = (clip_norm_ > 0 ? std::min(1.0, clip_norm_ / (norm + 1e-6)) : 1) / gradient_scale;
  }
  if (finite) {
    optimizers_[rank]->step(lr, factor);
    if (shards_[rank]) {
      shards_[rank]->send(step);
      waited += receive_shards(rank, step);
    }
  } else {
    optimizers_[rank]->skip();
    if (shards_[rank]) shards_[rank]->forget_gradients();
  }
  return now_seconds() - begin - waited;
}

void Update::finish(int64_t step, double gradient_scale, UpdateResult& result) {
  World& world = pipeline_.world();
  const MemoryMeter::Watch watch(pipeline_.meter());
  // Replicas have the same gradients, since their sums: those of the first count.
  if (world.replica > 0) result.squares.zero_();
  all_reduce_sum(*world.processes, result.squares, timeout_);
  result.grad_norm = norm_of(result.squares) / gradient_scale;
  const bool finite = all_finite(result.squares);
  result.skipped = !finite && gradient_scale != 1;
  if (!finite && !result.skipped) {
    pipeline_.on_ranks([&](int rank) { fail_not_finite(rank, result.squares, step); });
  }
}

}  // namespace twobp
