#include "twobp/nn/layers/cross_entropy.h"

#include "twobp/nn/kernels/operators.h"
#include "twobp/nn/kernels/products/padded_rows.h"
#include "twobp/nn/kernels/products/rows.h"

namespace twobp {
namespace {

// Number of positions whose label has the largest logit.
int64_t count_right(const at::Tensor& logits, const at::Tensor& labels) {
  return logits.argmax(-1).to(labels.device()).eq(labels).sum().item<int64_t>();
}

void check_labels(const at::Tensor& labels, int64_t vocab) {
  const int64_t* target = labels.const_data_ptr<int64_t>();
  for (int64_t r = 0; r < labels.numel(); ++r) {
    TWOBP_CHECK(target[r] == kIgnoreLabel || (target[r] >= 0 && target[r] < vocab), "label ", target[r],
                " at position ", r, " of the micro-batch is outside the vocabulary of ", vocab);
  }
}

// The sum of the losses of `rows` rows. If `gradient`, the logits are overwritten by their gradient.
double sum_of_losses(at::Tensor& logits, const int64_t* target, int64_t rows, double scale, bool gradient) {
  const int64_t cols = logits.size(-1);
  at::Tensor losses = at::empty({rows}, at::TensorOptions().dtype(at::kDouble));
  double* loss = losses.mutable_data_ptr<double>();
  dispatch_float(logits.scalar_type(), "CrossEntropy", [&](auto zero) {
    using S = decltype(zero);
    S* x = mutable_numbers<S>(logits);
    const int64_t stride = row_stride(logits);
    for_rows(rows, cols, [&](int64_t begin, int64_t end) {
      kernels<S>().cross_entropy(x + begin * stride, stride, target + begin, loss + begin, end - begin, cols,
                                 kIgnoreLabel, scale, gradient);
    });
  });
  double sum = 0;
  for (int64_t r = 0; r < rows; ++r) sum += loss[r];
  return sum;
}

}  // namespace

Values CrossEntropy::forward(Values values, Context& context, Saved& saved) {
  if (context.generating) return values;  // generation needs the logits
  at::Tensor logits = std::move(values[0]);
  const at::Tensor labels = context.field("labels").contiguous();
  const int64_t cols = logits.size(-1);
  const int64_t rows = logits.numel() / cols;
  TWOBP_CHECK(
      labels.scalar_type() == at::kLong && labels.sizes() == logits.sizes().slice(0, logits.dim() - 1),
      "labels ", labels.sizes(), " of dtype ", c10::toString(labels.scalar_type()), " do not fit logits ",
      logits.sizes(), ": one int64 label per position is needed");
  if (labels.is_cpu()) check_labels(labels, cols);
  const int64_t right = context.training ? 0 : count_right(logits, labels);
  logits = own_even_rows(std::move(logits));
  const double scale = context.loss_weight * context.loss_scale;
  Values out;
  if (by_operators(logits)) {
    const at::Tensor sum = operators::cross_entropy(logits, on_device(labels.view({-1}), logits.device()),
                                                    kIgnoreLabel, scale, context.keeps());
    out.push_back(sum * context.loss_weight);
  } else {
    const double sum = sum_of_losses(logits, labels.const_data_ptr<int64_t>(), rows, scale, context.keeps());
    out.push_back(at::scalar_tensor(sum * context.loss_weight, at::TensorOptions().dtype(at::kDouble)));
  }
  if (!context.training) out.push_back(at::scalar_tensor(right, at::TensorOptions().dtype(at::kLong)));
  if (context.keeps()) saved.keep_until_p1(std::move(logits));
  return out;
}

Values CrossEntropy::backward_p1(Values, Context&, Saved& saved) {
  return {saved.take_p1(0)};
}

}  // namespace twobp
