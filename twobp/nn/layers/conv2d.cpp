#include "twobp/nn/layers/conv2d.h"

#include "twobp/core/check.h"

namespace twobp {

Values Conv2d::forward(Values values, Context& context, Saved& saved) {
  at::Tensor x = as_contiguous(std::move(values[0]));
  at::Tensor y = convolution_.forward(x);
  if (context.keeps()) {
    if (convolution_.weight().trainable()) {
      saved.keep_until_p2(std::move(x));
    } else {
      saved.keep_until_p1(at::empty({1}, x.options()).expand(x.sizes()));  // keeps only x's sizes
    }
  }
  return {std::move(y)};
}

Values Conv2d::backward_p1(Values dy, Context&, Saved& saved) {
  return backward_p1(as_contiguous(std::move(dy[0])), saved, {});
}

Values Conv2d::backward_p1(at::Tensor dy, Saved& saved, at::Tensor add_to) {
  const bool trainable = convolution_.weight().trainable();
  TWOBP_CHECK(!trainable || saved.p2_count() == 1, "backward-p1 of convolution ", convolution_.weight().name(),
              " does not find exactly one saved tensor, its input: it runs once after each forward");
  const at::Tensor x = trainable ? saved.p2(0) : saved.take_p1(0);
  Values dx;
  if (gives_gradient_) dx.push_back(convolution_.input_gradient(dy, x.sizes(), std::move(add_to)));
  if (trainable) saved.keep_until_p2(std::move(dy));
  return dx;
}

void Conv2d::backward_p2(std::span<Saved* const> saved) {
  for (const Saved* one : saved) convolution_.add_weight_gradient(one->p2(0), one->p2(1));
}

void Conv2d::collect_p2(Saved& saved, std::vector<P2Unit>& units) {
  if (convolution_.weight().trainable()) units.push_back({this, &saved});
}

void Conv2d::collect_parameters(std::vector<Parameter*>& parameters) {
  parameters.push_back(&convolution_.weight());
}

}  // namespace twobp
