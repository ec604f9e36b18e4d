#include "twobp/train/update.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "twobp/core/check.h"
#include "twobp/core/clock.h"
#include "twobp/nn/kernels/rows.h"

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

// Messages of the update are told apart from the schedule's by a stage that none has.
Tag tied_tag(int64_t step, size_t weight, int use) {
  return {step, -1 - static_cast<int>(weight), use, Direction::kBackward};
}

}  // namespace

Update::Update(Pipeline& pipeline, const OptimizerConfig& config, double clip_norm, double timeout)
    : pipeline_(pipeline), clip_norm_(clip_norm), timeout_(timeout) {
  std::map<std::string, size_t> known;
  for (int s = 0; s < pipeline.stages(); ++s) {
    Stage& stage = pipeline.stage(s);
    for (int i = 0; i < stage.layer_count(); ++i) {
      for (Parameter* parameter : stage.parameters(i)) {
        const auto [at, is_new] = known.try_emplace(parameter->name(), all_.size());
        if (is_new) {
          all_.emplace_back();
          weights_.push_back(parameter);
        }
        TWOBP_CHECK(parameter->sizes() == weights_[at->second]->sizes(), "tied parameter ", parameter->name(),
                    " has two shapes");
        all_[at->second].push_back({parameter, stage.first_layer() + i, s, pipeline.rank_of_stage()[s]});
      }
    }
  }
  optimizers_.resize(pipeline.ranks());
  pipeline.on_ranks([&](int rank) {
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
    optimizers_[rank] = std::make_unique<Optimizer>(config, items);
  });
}

double Update::sum_tied(int rank, int64_t step) {
  double waited = 0;
  Transport& transport = pipeline_.rank(rank).transport();
  for (size_t w = 0; w < all_.size(); ++w) {
    Uses& uses = all_[w];
    if (uses.size() < 2 || !uses.front().parameter->trainable()) continue;
    std::set<int> ranks;
    for (const Use& use : uses) ranks.insert(use.rank);
    if (!ranks.contains(rank)) continue;
    // Everyone who holds the weight gets every use's gradient, and adds them up in the same order.
    for (size_t u = 0; u < uses.size(); ++u) {
      if (uses[u].rank != rank) continue;
      for (const int to : ranks) {
        if (to != rank)
          transport.isend(to, tied_tag(step, w, static_cast<int>(u)),
                          {uses[u].parameter->grad_to_add().clone()});
      }
    }
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
        const double end = now_seconds();
        waited += end - begin;
        pipeline_.rank(rank).waited_in_finish(begin, end);
      }
      sum = sum.defined() ? sum + grad : grad;
    }
    first_here->grad_to_add();
    first_here->grad.copy_(sum);
  }
  return waited;
}

double Update::reduce_norm(int rank, at::Tensor& squares, double gradient_scale, double& norm) {
  const double begin = now_seconds();
  pipeline_.rank(rank).transport().all_reduce_sum(squares, timeout_);
  const double end = now_seconds();
  const double waited = end - begin;
  pipeline_.rank(rank).waited_in_finish(begin, end);
  double sum = 0;
  for (int64_t i = 0; i < squares.numel(); ++i) sum += squares.const_data_ptr<double>()[i];
  norm = std::sqrt(sum) / gradient_scale;
  if (rank == 0) grad_norm_ = norm;
  return waited;
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
  pipeline_.rank(rank).transport().all_reduce_sum(bad_weights, timeout_);
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

double Update::run(int rank, int64_t step, double lr, double gradient_scale) {
  const double begin = now_seconds();
  double waited = sum_tied(rank, step);
  // One sum of squares per layer, those of other ranks zero: adding them over ranks changes no bit.
  at::Tensor squares = at::zeros({static_cast<int64_t>(pipeline_.model().layers.size())},
                                 at::TensorOptions().dtype(at::kDouble));
  for (const Uses& uses : all_) {
    const Use& use = uses.front();
    if (use.rank == rank && use.parameter->has_grad()) {
      squares.mutable_data_ptr<double>()[use.layer] += sum_of_squares(use.parameter->grad);
    }
  }
  double norm = 0;
  const bool scaled = gradient_scale != 1;
  // Whether and how the step is taken depends on all ranks, unless nothing is clipped or scaled.
  const bool early = clip_norm_ == 0 && !scaled;
  if (early && all_finite(squares)) optimizers_[rank]->step(lr, 1);
  waited += reduce_norm(rank, squares, gradient_scale, norm);
  const bool finite = all_finite(squares);
  if (!finite && !scaled) fail_not_finite(rank, squares, step);
  if (rank == 0) skipped_ = !finite;
  if (!finite) {
    optimizers_[rank]->skip();
  } else if (!early) {
    const double clip = clip_norm_ > 0 ? std::min(1.0, clip_norm_ / (norm + 1e-6)) : 1;
    optimizers_[rank]->step(lr, clip / gradient_scale);
  }
  return now_seconds() - begin - waited;
}

}  // namespace twobp
