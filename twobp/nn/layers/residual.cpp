#include "twobp/nn/layers/residual.h"

#include "twobp/core/check.h"

namespace twobp {

Values Residual::forward(Values x, Context& context, Saved& saved) {
  Values y = branch().forward(x, context, saved);
  if (scale_ != 1) y[0].mul_(scale_);
  y[0].add_(x[0]);
  return y;
}

Values Residual::backward_p1(Values dy, Context& context, Saved& saved) {
  Values of_branch = dy;
  if (scale_ != 1) of_branch[0] = dy[0] * scale_;
  Values dx = branch().backward_p1(std::move(of_branch), context, saved);
  dx[0].add_(dy[0]);
  return dx;
}

Values ResidualBegin::forward(Values x, Context& context, Saved& saved) {
  Values y = branch().forward(x, context, saved);
  return {std::move(x[0]), std::move(y[0])};
}

Values ResidualBegin::backward_p1(Values dy, Context& context, Saved& saved) {
  const at::Tensor dx_around = std::move(dy[0]);
  Values dx = branch().backward_p1({std::move(dy[1])}, context, saved);
  dx[0].add_(dx_around);
  return dx;
}

Values ResidualEnd::forward(Values x, Context& context, Saved& saved) {
  TWOBP_CHECK(x.size() == 2, "ResidualEnd takes two tensors, x and the output of the branch's first part, but got ",
              x.size());
  const at::Tensor around = std::move(x[0]);
  Values y = branch().forward({std::move(x[1])}, context, saved);
  y[0].add_(around);
  return y;
}

Values ResidualEnd::backward_p1(Values dy, Context& context, Saved& saved) {
  at::Tensor around = dy[0];
  Values of_branch = branch().backward_p1(std::move(dy), context, saved);
  return {std::move(around), std::move(of_branch[0])};
}

Values ResidualJoin::forward(Values x, Context& context, Saved& saved) {
  TWOBP_CHECK(x.size() == 2, "ResidualJoin takes two tensors, x and the first branch's output, but got ", x.size());
  Values y = branch().forward({x[0]}, context, saved);
  y[0].add_(x[1]).add_(x[0]);
  return y;
}

Values ResidualJoin::backward_p1(Values dy, Context& context, Saved& saved) {
  Values dx = branch().backward_p1(dy, context, saved);
  dx[0].add_(dy[0]);
  return {std::move(dx[0]), std::move(dy[0])};
}

}  // namespace twobp
