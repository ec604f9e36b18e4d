#include "twobp/autograd/autograd_layer.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>

#include "twobp/core/check.h"

namespace twobp {
namespace {

// Rank threads run below autograd; while this lives, the thread builds graphs again.
class WithAutograd {
 public:
  WithAutograd() : before_(c10::impl::tls_local_dispatch_key_set()), grad_mode_(true) {
    auto keys = before_;
    keys.excluded_ = keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView;
    c10::impl::_force_tls_local_dispatch_key_set(keys);
  }
  ~WithAutograd() { c10::impl::_force_tls_local_dispatch_key_set(before_); }
  WithAutograd(const WithAutograd&) = delete;
  WithAutograd& operator=(const WithAutograd&) = delete;

 private:
  c10::impl::LocalDispatchKeySet before_;
  at::AutoGradMode grad_mode_;
};

}  // namespace

AutogradLayer::AutogradLayer(Function function, NamedLeaves leaves)
    : function_(std::move(function)), leaves_(std::move(leaves)) {
  for (const auto& [name, leaf] : leaves_) {
    parameters_.push_back(std::make_unique<Parameter>(name, leaf.detach().clone()));
  }
}

void AutogradLayer::link() {
  for (size_t i = 0; i < leaves_.size(); ++i) {
    at::Tensor& leaf = leaves_[i].second;
    const Parameter& parameter = *parameters_[i];
    if (leaf.const_data_ptr() != parameter.value.const_data_ptr()) leaf.set_data(parameter.value);
    leaf.requires_grad_(parameter.trainable());
  }
}

Values AutogradLayer::forward(Values x, Context& context, Saved& saved) {
  link();
  if (!context.keeps()) {
    return {function_(x, context).detach()};
  }
  const WithAutograd autograd;
  Values inputs;
  for (at::Tensor& value : x) {
    inputs.push_back(value.detach());
    if (inputs.back().is_floating_point()) inputs.back().requires_grad_(true);
  }
  x.clear();
  const at::Tensor y = function_(inputs, context);
  TWOBP_CHECK(y.requires_grad(),
              "an AutogradLayer's output depends on no tensor that requires a gradient, so it has no "
              "backward pass");
  saved.keep_until_p2(y);
  for (at::Tensor& input : inputs) saved.keep_until_p1(std::move(input));
  return {y.detach()};
}

Values AutogradLayer::backward_p1(Values dy, Context& context, Saved& saved) {
  TWOBP_CHECK(saved.p2_count() == 1,
              "backward-p1 of an AutogradLayer does not find exactly one saved tensor, its output: it runs once "
              "after each forward");
  const WithAutograd autograd;
  const at::Tensor& y = saved.p2(0);
  // A loss is the end: its gradient is 1, times the scale.
  at::Tensor gradient =
      dy.empty() ? at::ones_like(y, y.options().requires_grad(false)) * context.loss_scale : std::move(dy[0]);
  std::vector<at::Tensor> inputs;
  for (size_t i = 0; i < saved.p1_count(); ++i) {
    at::Tensor input = saved.take_p1(i);
    if (input.requires_grad()) inputs.push_back(std::move(input));
  }
  Values dx;
  if (!inputs.empty()) {
    for (at::Tensor& one : torch::autograd::grad({y}, inputs, {gradient}, /*retain_graph=*/true)) {
      dx.push_back(one.detach());
    }
  }
  saved.keep_until_p2(std::move(gradient));
  return dx;
}

void AutogradLayer::backward_p2(std::span<Saved* const> saved) {
  const WithAutograd autograd;
  std::vector<at::Tensor> leaves;
  std::vector<Parameter*> trained;
  for (size_t i = 0; i < leaves_.size(); ++i) {
    if (!parameters_[i]->trainable()) continue;
    leaves.push_back(leaves_[i].second);
    trained.push_back(parameters_[i].get());
  }
  for (const Saved* one : saved) {
    const auto grads = torch::autograd::grad({one->p2(0)}, leaves, {one->p2(1)}, /*retain_graph=*/false,
                                             /*create_graph=*/false, /*allow_unused=*/true);
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < grads.size(); ++i) {
      if (grads[i].defined()) trained[i]->grad_to_add().add_(grads[i]);
    }
  }
}

void AutogradLayer::collect_p2(Saved& saved, std::vector<P2Unit>& units) {
  for (const auto& parameter : parameters_) {
    if (!parameter->trainable()) continue;
    units.push_back({this, &saved});
    return;
  }
  saved.release_p2();  // nothing comes back for the graph
}

void AutogradLayer::collect_parameters(std::vector<Parameter*>& parameters) {
  for (const auto& parameter : parameters_) parameters.push_back(parameter.get());
}

}  // namespace twobp
