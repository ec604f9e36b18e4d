#include "twobp/nn/layers/residual.h"

namespace twobp {

Values Residual::forward(Values x, Context& context, Saved& saved) {
  context.owns_input = false;  // x is read again below
  Values y = branch_->forward(x, context, saved);
  y[0].add_(x[0]);
  return y;
}

Values Residual::backward_p1(Values dy, Context& context, Saved& saved) {
  Values dx = branch_->backward_p1(dy, context, saved);
  dx[0].add_(dy[0]);
  return dx;
}

void Residual::collect_p2(Saved& saved, std::vector<P2Unit>& units) {
  branch_->collect_p2(saved, units);
}
void Residual::collect_parameters(std::vector<Parameter*>& parameters) {
  branch_->collect_parameters(parameters);
}

}  // namespace twobp
