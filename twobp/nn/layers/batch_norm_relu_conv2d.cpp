#include "twobp/nn/layers/batch_norm_relu_conv2d.h"

#include "twobp/core/check.h"

namespace twobp {

Values BatchNormReluConv2d::forward(Values values, Context& context, Saved& saved) {
  return {convolution_.forward(norm_.forward(std::move(values), /*relu=*/true, context, saved))};
}

Values BatchNormReluConv2d::backward_p1(Values values, Context&, Saved& saved) {
  const auto [x, scales] = BatchNormRows::take(saved);
  at::Tensor dy = as_contiguous(std::move(values[0]));
  at::Tensor dx = convolution_.input_gradient(dy, x.sizes());
  const at::Tensor sums = norm_.backward_sums(dx, x, scales, /*relu=*/true);
  const bool trainable = convolution_.weight().trainable();
  at::Tensor input;  // input of the convolution
  if (trainable) input = exclusively_owned(x) ? x : at::empty_like(x);
  norm_.backward(dx, x, scales, sums, /*relu=*/true, dx, input);
  if (trainable) {
    saved.keep_until_p2(std::move(input));
    saved.keep_until_p2(std::move(dy));
  }
  return {std::move(dx)};
}

void BatchNormReluConv2d::backward_p2(std::span<Saved* const> saved) {
  for (const Saved* one : saved) {
    TWOBP_CHECK(one->p2_count() == 2, "backward-p2 of convolution ", convolution_.weight().name(),
                " runs before its backward-p1: run it after that, once");
    convolution_.add_weight_gradient(one->p2(0), one->p2(1));
  }
}

void BatchNormReluConv2d::collect_p2(Saved& saved, std::vector<P2Unit>& units) {
  if (convolution_.weight().trainable()) units.push_back({this, &saved});
}

void BatchNormReluConv2d::collect_parameters(std::vector<Parameter*>& parameters) {
  norm_.collect_parameters(parameters);
  parameters.push_back(&convolution_.weight());
}

}  // namespace twobp
