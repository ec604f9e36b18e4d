#include "twobp/nn/layers/losses.h"

#include "twobp/core/check.h"
#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/kernels/rows/row_operations.h"
#include "twobp/nn/layers/squared_error.h"

namespace twobp {
namespace {

// Number of positions whose label has the largest logit.
int64_t count_right(const at::Tensor& logits, const at::Tensor& labels) {
  return logits.argmax(-1).to(labels.device()).eq(labels).sum().item<int64_t>();
}

}  // namespace

Values CrossEntropy::forward(Values values, Context& context, Saved& saved) {
  at::Tensor logits = std::move(values[0]);
  if (context.wants_logits) {
    if (form_.scale != 1) logits = logits * form_.scale;
    if (form_.cap > 0) soft_cap(logits = own_even_rows(std::move(logits)), form_.cap);
    return {std::move(logits)};
  }
  const at::Tensor labels = context.field("labels").contiguous();
  TWOBP_CHECK(labels.scalar_type() == at::kLong && labels.sizes() == logits.sizes().slice(0, logits.dim() - 1),
              "labels ", labels.sizes(), " of dtype ", c10::toString(labels.scalar_type()), " do not fit logits ",
              logits.sizes(), ": one int64 label per position is needed");
  const int64_t right = context.training ? 0 : count_right(logits, labels);
  logits = own_even_rows(std::move(logits));
  if (form_.scale != 1) logits.mul_(form_.scale);
  const LossFactor of_gradient = context.loss_weight * context.loss_scale * form_.scale;
  const at::Tensor sum = cross_entropy(logits, labels, kIgnoreLabel, of_gradient, context.keeps(), form_.cap);
  Values out = {sum * context.loss_weight};
  if (!context.training) out.push_back(at::scalar_tensor(right, at::TensorOptions().dtype(at::kLong)));
  if (context.keeps()) saved.keep_until_p1(std::move(logits));
  return out;
}

Values CrossEntropy::backward_p1(Values, Context&, Saved& saved) {
  return {saved.take_p1(0)};
}

Values CountedPositions::forward(Values values, Context& context, Saved& saved) {
  if (context.wants_logits) return branch_->forward(std::move(values), context, saved.child(0));
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
