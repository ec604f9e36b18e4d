#include "twobp/nn/layers/counted_positions.h"

#include "twobp/core/check.h"
#include "twobp/nn/layers/cross_entropy.h"

namespace twobp {

Values CountedPositions::forward(Values values, Context& context, Saved& saved) {
  if (context.generating) return branch_->forward(std::move(values), context, saved.child(0));
  at::Tensor x = std::move(values[0]);
  const at::Tensor& labels = context.field("labels");
  TWOBP_CHECK(labels.scalar_type() == at::kLong && x.dim() == 3 && labels.sizes() == x.sizes().slice(0, 2), "labels ",
              labels.sizes(), " of dtype ", c10::toString(labels.scalar_type()), " do not fit the head's input ",
              x.sizes(), ": one int64 label per position is needed");
  const at::Tensor flat = labels.reshape({-1});
  at::Tensor rows = flat.ne(kIgnoreLabel).nonzero().view({-1});  // in order
  const Fields fields = {{"labels", flat.index_select(0, rows)}};
  Context inner = context;
  inner.fields = &fields;
  at::Tensor counted = at::empty({rows.size(0), x.size(2)}, x.options());
  rows = on_device(rows, x.device());
  at::index_select_out(counted, x.reshape({-1, x.size(2)}), 0, rows);
  Values loss = branch_->forward({std::move(counted)}, inner, saved.child(0));
  if (context.keeps()) saved.keep_until_p1(std::move(rows));
  return loss;
}

Values CountedPositions::backward_p1(Values dy, Context& context, Saved& saved) {
  const at::Tensor rows = saved.take_p1(0);
  const at::Tensor& labels = context.field("labels");
  const Values counted = branch_->backward_p1(std::move(dy), context, saved.child(0));
  const int64_t cols = counted[0].size(-1);
  at::Tensor dx = at::empty({labels.size(0), labels.size(1), cols}, counted[0].options());
  dx.zero_();
  dx.view({-1, cols}).index_copy_(0, rows, counted[0]);
  return {std::move(dx)};
}

void CountedPositions::collect_p2(Saved& saved, std::vector<P2Unit>& units) {
  branch_->collect_p2(saved.child(0), units);
}
void CountedPositions::collect_parameters(std::vector<Parameter*>& parameters) {
  branch_->collect_parameters(parameters);
}

}  // namespace twobp
