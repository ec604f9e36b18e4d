#include "twobp/nn/layers/add_norm.h"

#include <utility>

#include "twobp/core/check.h"

namespace twobp {

Values AddNorm::forward(Values values, Context& context, Saved& saved) {
  const at::Tensor x = as_contiguous(std::move(values[0]));
  norm_.check(x);
  Values branch = branch_->forward({x}, context, saved.child(0));
  TWOBP_CHECK(branch[0].sizes() == x.sizes(), "the branch of AddNorm ", norm_.name(), " returns ", branch[0].sizes(),
              " for an input ", x.sizes(), ", so the two cannot be added");
  at::Tensor from = as_contiguous(std::move(branch[0]));
  at::Tensor sum = exclusively_owned(from) ? from : at::empty_like(x);
  at::Tensor y = at::empty_like(x);
  const DropoutMask mask = rate_.mask(context);
  at::Tensor statistics = norm_.forward(
      sum, y, [&](int64_t begin, int64_t end) { dropout_rows(from, x, sum, norm_.dim(), mask, begin, end); });
  from.reset();
  if (context.keeps()) {
    saved.keep_until_p1(std::move(sum));
    saved.keep_until_p1(std::move(statistics));
  }
  return {std::move(y)};
}

Values AddNorm::backward_p1(Values values, Context& context, Saved& saved) {
  at::Tensor sum = saved.take_p1(0);
  at::Tensor statistics = saved.take_p1(1);
  at::Tensor dy = as_contiguous(std::move(values[0]));
  TWOBP_CHECK(dy.sizes() == sum.sizes(), "the gradient ", dy.sizes(), " does not fit the output of AddNorm ",
              norm_.name(), ", ", sum.sizes());
  const bool drops = rate_.active(context);
  at::Tensor dsum = exclusively_owned(dy) ? dy : at::empty_like(dy);
  at::Tensor branch = dsum;  // dL/d(branch's output)
  if (drops) branch = exclusively_owned(sum) ? sum : at::empty_like(sum);
  const DropoutMask mask = rate_.mask(context);
  LayerNormRows::Rows drop_again;
  if (drops) {
    drop_again = [&](int64_t begin, int64_t end) { dropout_rows(dsum, {}, branch, norm_.dim(), mask, begin, end); };
  }
  norm_.backward(dy, sum, statistics, dsum, {}, drop_again);
  sum.reset();
  dy.reset();
  statistics.reset();
  Values dx = branch_->backward_p1({std::move(branch)}, context, saved.child(0));
  dx[0].add_(dsum);
  return dx;
}

void AddNorm::collect_p2(Saved& saved, std::vector<P2Unit>& units) {
  branch_->collect_p2(saved.child(0), units);
}

void AddNorm::collect_parameters(std::vector<Parameter*>& parameters) {
  branch_->collect_parameters(parameters);
  norm_.collect_parameters(parameters);
}

}  // namespace twobp
