#include "twobp/nn/layers/cross_entropy.h"

#include "twobp/core/check.h"
#include "twobp/nn/kernels/cross_entropy.h"
#include "twobp/nn/kernels/products/padded_rows.h"

namespace twobp {
namespace {

// Number of positions whose label has the largest logit.
int64_t count_right(const at::Tensor& logits, const at::Tensor& labels) {
  return logits.argmax(-1).to(labels.device()).eq(labels).sum().item<int64_t>();
}

}  // namespace

Values CrossEntropy::forward(Values values, Context& context, Saved& saved) {
  at::Tensor logits = std::move(values[0]);
  if (context.generating) {  // it needs the logits
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

}  // namespace twobp
