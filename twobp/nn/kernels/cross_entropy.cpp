#include "twobp/nn/kernels/cross_entropy.h"

#include "twobp/nn/kernels/operators.h"
#include "twobp/nn/kernels/products/padded_rows.h"
#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/values.h"

namespace twobp {
namespace {

void check_labels(const at::Tensor& labels, int64_t classes, int64_t ignore) {
  const int64_t* target = labels.const_data_ptr<int64_t>();
  for (int64_t r = 0; r < labels.numel(); ++r) {
    TWOBP_CHECK(target[r] == ignore || (target[r] >= 0 && target[r] < classes), "label ", target[r],
                " at position ", r, " of the micro-batch is outside the vocabulary of ", classes);
  }
}

}  // namespace

at::Tensor cross_entropy(at::Tensor& logits, const at::Tensor& labels, int64_t ignore, double scale,
                         bool gradient) {
  const int64_t cols = logits.size(-1);
  const int64_t rows = labels.numel();
  if (labels.is_cpu()) check_labels(labels, cols, ignore);
  if (by_operators(logits)) {
    return operators::cross_entropy(logits, on_device(labels.view({-1}), logits.device()), ignore, scale,
                                    gradient);
  }
  at::Tensor losses = at::empty({rows}, at::TensorOptions().dtype(at::kDouble));
  double* loss = losses.mutable_data_ptr<double>();
  const int64_t* target = labels.const_data_ptr<int64_t>();
  dispatch_float(logits.scalar_type(), "CrossEntropy", [&](auto zero) {
    using S = decltype(zero);
    S* x = mutable_numbers<S>(logits);
    const int64_t stride = row_stride(logits);
    for_rows(rows, cols, [&](int64_t begin, int64_t end) {
      kernels<S>().cross_entropy(x + begin * stride, stride, target + begin, loss + begin, end - begin, cols,
                                 ignore, scale, gradient);
    });
  });
  double sum = 0;
  for (int64_t r = 0; r < rows; ++r) sum += loss[r];
  return at::scalar_tensor(sum, at::TensorOptions().dtype(at::kDouble));
}

}  // namespace twobp
