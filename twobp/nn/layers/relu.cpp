#include "twobp/nn/layers/relu.h"

#include "twobp/core/check.h"

namespace twobp {

Values Relu::forward(Values values, Context& context, Saved& saved) {
  at::Tensor x = std::move(values[0]);
  TWOBP_CHECK(x.is_floating_point(), "ReLU takes floating point numbers, got ",
              c10::toString(x.scalar_type()));
  at::Tensor y = exclusively_owned(x) ? x.relu_() : at::relu(x);
  if (context.keeps()) saved.keep_until_p1(y);
  return {std::move(y)};
}

Values Relu::backward_p1(Values values, Context&, Saved& saved) {
  const at::Tensor y = saved.take_p1(0);
  TWOBP_CHECK(values[0].sizes() == y.sizes(), "the gradient ", values[0].sizes(),
              " does not fit the output of ReLU, ", y.sizes());
  return {at::threshold_backward(values[0], y, 0)};
}

}  // namespace twobp
