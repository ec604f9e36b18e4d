#include "twobp/nn/layers/squared_error.h"

#include "twobp/core/check.h"

namespace twobp {

Values SquaredError::forward(Values x, Context& context, Saved& saved) {
  const at::Tensor& target = context.field("target");
  TWOBP_CHECK(target.sizes() == x[0].sizes(), "target ", target.sizes(), " does not fit the output ", x[0].sizes());
  TWOBP_CHECK(target.scalar_type() == x[0].scalar_type(), "target of dtype ", c10::toString(target.scalar_type()),
              " does not fit the output's ", c10::toString(x[0].scalar_type()));
  const LossFactor scale =
      context.loss_weight * static_cast<double>(target.size(0)) / static_cast<double>(target.numel());
  at::Tensor difference = x[0] - on_device(target, x[0].device());
  const at::Tensor flat = difference.reshape({-1});
  at::Tensor loss = at::dot(flat, flat).to(at::kDouble) / 2 * scale;
  if (context.keeps()) saved.keep_until_p1(difference *= scale * context.loss_scale);
  return {std::move(loss)};
}

Values SquaredError::backward_p1(Values, Context&, Saved& saved) {
  return {saved.take_p1(0)};
}

}  // namespace twobp
