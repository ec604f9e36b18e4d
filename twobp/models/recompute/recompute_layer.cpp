#include "twobp/models/recompute/recompute_layer.h"

#include <optional>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/nn/layers/expert_exchange.h"

namespace twobp {
namespace {

enum RecomputeChild : uint8_t { kInner, kInput, kGradient };

// While this object lives, the parameters' gradients do not change.
class DiscardGradients {
 public:
  explicit DiscardGradients(const std::vector<Parameter*>& parameters) : parameters_(parameters) {
    for (Parameter* parameter : parameters_) parameter->discard_gradients(true);
  }
  ~DiscardGradients() {
    for (Parameter* parameter : parameters_) parameter->discard_gradients(false);
  }
  DiscardGradients(const DiscardGradients&) = delete;
  DiscardGradients& operator=(const DiscardGradients&) = delete;

 private:
  const std::vector<Parameter*>& parameters_;
};

// Moves out what was kept until p2, so that the layer may hold the tensors exclusively.
Values take_p2(Saved& saved) {
  Values values;
  for (size_t i = 0; i < saved.p2_count(); ++i) values.push_back(saved.p2(i));
  saved.release_p2();
  return values;
}

Values take_p1(Saved& saved) {
  Values values;
  for (size_t i = 0; i < saved.p1_count(); ++i) values.push_back(saved.take_p1(i));
  saved.release_p1();
  return values;
}

Values copies_of_p2(const Saved& saved) {
  Values values;
  for (size_t i = 0; i < saved.p2_count(); ++i) values.push_back(saved.p2(i));
  return values;
}

}  // namespace

RecomputeLayer::RecomputeLayer(std::unique_ptr<Layer> layer, Recompute mode)
    : layer_(std::move(layer)),
      mode_(mode),
      again_in_p1_(recomputes_activations(mode)),
      again_in_p2_(recomputes_derivatives(mode)) {
  layer_->collect_parameters(parameters_);
}

bool RecomputeLayer::recomputes_in_p2() {
  if (!again_in_p2_) return false;
  Saved none;
  std::vector<P2Unit> units;
  layer_->collect_p2(none, units);
  return !units.empty();
}

void RecomputeLayer::forward_again(Values x, const Context& context, Saved& inner) {
  std::vector<std::pair<Parameter*, at::Tensor>> buffers;
  for (Parameter* parameter : parameters_) {
    if (parameter->is_buffer() && !parameter->counts_tokens())
      buffers.emplace_back(parameter, parameter->value.clone());
  }
  Context again = context;
  std::optional<CountedExperts> counted;
  if (context.experts != nullptr) again.experts = &counted.emplace(*context.experts);
  layer_->forward(std::move(x), again, inner);
  for (auto& [buffer, before] : buffers) buffer->value.copy_(before);
}

Values RecomputeLayer::forward(Values x, Context& context, Saved& saved) {
  Saved& inner = saved.child(kInner);
  const bool until_p2 = recomputes_in_p2();
  if (!context.keeps() || (!again_in_p1_ && !until_p2)) {
    return layer_->forward(std::move(x), context, inner);
  }
  Saved& input = saved.child(kInput);
  input.keep_context(context);  // also shows backward-p1 that forward ran, if there is no input
  for (const at::Tensor& one : x) {
    if (until_p2) {
      input.keep_until_p2(one);
    } else {
      input.keep_until_p1(one);
    }
  }
  if (!again_in_p1_) return layer_->forward(std::move(x), context, inner);
  Context keeps_nothing = context;
  keeps_nothing.backward = false;
  return layer_->forward(std::move(x), keeps_nothing, inner);
}

Values RecomputeLayer::backward_p1(Values dy, Context& context, Saved& saved) {
  Saved& inner = saved.child(kInner);
  const bool until_p2 = recomputes_in_p2();
  if (!again_in_p1_ && !until_p2) return layer_->backward_p1(std::move(dy), context, inner);
  Saved& input = saved.child(kInput);
  Saved& gradient = saved.child(kGradient);
  TWOBP_CHECK(input.has_context() && !gradient.has_context(), "backward-p1 of a layer that recomputes ",
              recompute_name(mode_), " finds no saved input: it runs once after each forward");
  if (again_in_p1_) forward_again(until_p2 ? copies_of_p2(input) : take_p1(input), context, inner);
  if (until_p2) {
    gradient.keep_context(context);
    for (const at::Tensor& one : dy) gradient.keep_until_p2(one);
  } else {
    input.release();
  }
  Values dx = layer_->backward_p1(std::move(dy), context, inner);
  inner.release_p1();
  if (until_p2) inner.release();
  return dx;
}

void RecomputeLayer::backward_p2(std::span<Saved* const> saved) {
  std::vector<P2Unit> units;
  for (Saved* one : saved) {
    Saved& inner = one->child(kInner);
    Saved& gradient = one->child(kGradient);
    Context context = gradient.context();
    context.experts = nullptr;  // W exchanges no tokens, and F has counted them
    forward_again(take_p2(one->child(kInput)), context, inner);
    {
      const DiscardGradients discard(parameters_);
      layer_->backward_p1(take_p2(gradient), context, inner);
    }
    inner.release_p1();
    units.clear();
    layer_->collect_p2(inner, units);
    for (const P2Unit& unit : units) {
      unit.layer->backward_p2({&unit.saved, 1});
      unit.saved->release_p2();
    }
    one->release();
  }
}

void RecomputeLayer::collect_p2(Saved& saved, std::vector<P2Unit>& units) {
  if (recomputes_in_p2()) {
    units.push_back({this, &saved});
  } else {
    layer_->collect_p2(saved.child(kInner), units);
  }
}

void RecomputeLayer::collect_parameters(std::vector<Parameter*>& parameters) {
  parameters.insert(parameters.end(), parameters_.begin(), parameters_.end());
}

}  // namespace twobp
