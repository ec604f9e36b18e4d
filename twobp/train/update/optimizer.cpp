#include "twobp/train/update/optimizer.h"

#include <algorithm>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/nn/kernels/products/products.h"
#include "twobp/pipeline/memory/memory_meter.h"

namespace twobp {
namespace {

// The fused kernels copy a gradient whose channels come last, if it is not flat.
at::Tensor flat(const at::Tensor& tensor) {
  return tensor.as_strided({tensor.numel()}, {1}, tensor.storage_offset());
}

}  // namespace

Optimizer::Optimizer(const OptimizerConfig& config, const std::vector<Item>& items) : config_(config) {
  const std::vector<std::string> known = {"adamw", "adam", "sgd", "muon"};
  TWOBP_CHECK(std::find(known.begin(), known.end(), config.type) != known.end(), "unknown optimizer '", config.type,
              "'");
  // The fused kernels read it on the device of the weights.
  const at::Device device = items.empty() ? at::kCPU : items.front().parameter->master.device();
  count_ = at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(device));
  const ParameterGroups groups(config);
  for (const Item& item : items) {
    Group& group = group_of(groups.rule_of(*item.parameter, item.hidden));
    const MemoryMeter::Scope scope(item.stage, MemoryCategory::kOptimizer);
    const at::Tensor& value = group.values.emplace_back(item.master());
    group.items.push_back(item);
    group.done.push_back(false);
    if (config.type != "sgd" || config.momentum > 0) group.first.push_back(at::zeros_like(value));
    if (adam(group)) group.second.push_back(at::zeros_like(value));
  }
}

at::Tensor Optimizer::Item::of(const at::Tensor& tensor) const {
  return whole() ? tensor : tensor.as_strided({end - begin}, {1}, tensor.storage_offset() + begin);
}

Optimizer::Group& Optimizer::group_of(const ParameterRule& rule) {
  for (Group& group : groups_) {
    if (group.rule == rule) return group;
  }
  groups_.emplace_back().rule = rule;
  return groups_.back();
}

void Optimizer::complete_gradients() {
  for (const Group& group : groups_) {
    for (size_t i = 0; i < group.items.size(); ++i) {
      if (!group.done[i]) group.items[i].parameter->grad_to_add();
    }
  }
}

void Optimizer::step(double lr, double grad_factor) {
  if (!undone_) complete_gradients();
  if (!std::exchange(begun_, false)) count_.add_(1);
  for (Group& group : groups_) {
    std::vector<size_t> rest;
    for (size_t i = 0; i < group.items.size(); ++i) {
      if (!group.done[i]) rest.push_back(i);
    }
    update(group, rest, lr, grad_factor);
    group.done.assign(group.done.size(), false);
  }
  stepped_ = true;
  undone_ = false;
}

void Optimizer::step_early(const std::vector<Parameter*>& parameters, double lr) {
  if (!std::exchange(begun_, true)) count_.add_(1);
  for (Group& group : groups_) {
    std::vector<size_t> which;
    for (size_t i = 0; i < group.items.size(); ++i) {
      if (std::ranges::find(parameters, group.items[i].parameter) == parameters.end()) continue;
      which.push_back(i);
      group.done[i] = true;
    }
    update(group, which, lr, 1);
  }
}

void Optimizer::update(const Group& group, const std::vector<size_t>& which, double lr, double grad_factor) {
  if (which.empty()) return;
  const double group_lr = lr * group.rule.lr_scale;
  group.rule.muon ? update_by_muon(group, which, group_lr, grad_factor)
                  : update_fused(group, which, group_lr, grad_factor);
  for (const size_t i : which) {
    const Item& item = group.items[i];
    item.parameter->forget_grad();
    if (item.whole()) item.parameter->refresh_value();  // a part is refreshed with the others', which come later
  }
}

void Optimizer::update_fused(const Group& group, const std::vector<size_t>& which, double lr, double grad_factor) {
  Tensors all;
  for (const size_t i : which) {
    all.values.push_back(flat(group.values[i]));
    all.grads.push_back(flat(group.items[i].of(group.items[i].parameter->grad)));
    if (!group.first.empty()) all.first.push_back(flat(group.first[i]));
    if (!group.second.empty()) all.second.push_back(flat(group.second[i]));
    all.steps.push_back(count_);
  }
  // The fused kernels divide by grad_scale.
  std::optional<at::Tensor> grad_scale;
  if (grad_factor != 1) grad_scale = at::scalar_tensor(1 / grad_factor, count_.options());
  const double decay = group.rule.weight_decay;
  if (config_.type == "sgd") {
    at::_fused_sgd_(all.values, all.grads, all.first, decay, config_.momentum, lr,
                    /*dampening=*/0, /*nesterov=*/false, /*maximize=*/false, /*is_first_step=*/!stepped_, grad_scale);
  } else if (config_.type == "adam") {
    at::_fused_adam_(all.values, all.grads, all.first, all.second, {}, all.steps, lr, config_.beta1, config_.beta2,
                     decay, config_.eps, /*amsgrad=*/false, /*maximize=*/false, grad_scale);
  } else {
    at::_fused_adamw_(all.values, all.grads, all.first, all.second, {}, all.steps, lr, config_.beta1, config_.beta2,
                      decay, config_.eps, /*amsgrad=*/false, /*maximize=*/false, grad_scale);
  }
}

// Projections that are stored as one weight are made orthogonal one by one.
void Optimizer::update_by_muon(const Group& group, const std::vector<size_t>& which, double lr,
                               double grad_factor) const {
  const MemoryMeter::Scope scope(group.items.front().stage, MemoryCategory::kOptimizer);
  std::vector<MuonMatrix> matrices;
  for (const size_t i : which) {
    const Parameter& parameter = *group.items[i].parameter;
    if (grad_factor != 1) parameter.grad.mul_(grad_factor);
    const auto values = parameter.projections_of(group.values[i]);
    const auto grads = parameter.projections_of(parameter.grad);
    const auto momenta = parameter.projections_of(group.first[i]);
    for (size_t part = 0; part < values.size(); ++part)
      matrices.push_back({values[part], grads[part], momenta[part], product_type(parameter.value)});
  }
  muon_step(matrices, {lr, group.rule.weight_decay, config_.muon_momentum});
}

void Optimizer::skip() {
  if (std::exchange(begun_, false)) count_.sub_(1);
  for (Group& group : groups_) {
    for (const Item& item : group.items) item.parameter->forget_grad();
    group.done.assign(group.done.size(), false);
  }
  undone_ = false;
}

void Optimizer::add_to(Savepoint& savepoint, bool gradients) const {
  for (const Group& group : groups_) {
    for (const auto* tensors : {&group.values, &group.first, &group.second}) {
      for (size_t i = 0; i < tensors->size(); ++i) savepoint.add((*tensors)[i], group.items[i].stage);
    }
    for (size_t i = 0; gradients && i < group.items.size(); ++i)
      savepoint.add(group.items[i].parameter->grad, group.items[i].stage);
  }
}

void Optimizer::undo() {
  set_steps(steps() - 1);
  for (Group& group : groups_) {
    for (const Item& item : group.items) item.parameter->refresh_value();
  }
  undone_ = true;
}

std::vector<Optimizer::State> Optimizer::state() const {
  std::vector<State> all;
  for (const Group& group : groups_) {
    for (size_t i = 0; i < group.items.size(); ++i) {
      const Item& item = group.items[i];
      if (!group.first.empty()) all.push_back({item, adam(group) ? "exp_avg" : "momentum", group.first[i]});
      if (!group.second.empty()) all.push_back({item, "exp_avg_sq", group.second[i]});
    }
  }
  return all;
}

int64_t Optimizer::steps() const {
  return static_cast<int64_t>(count_.item<float>());
}

void Optimizer::set_steps(int64_t steps) {
  count_.fill_(static_cast<double>(steps));
  stepped_ = steps > 0;  // sgd's first update sets the momentum instead of adding to it
}

}  // namespace twobp
