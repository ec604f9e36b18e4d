#include "twobp/nn/kernels/cross_entropy.h"

#include <vector>

#include "twobp/nn/kernels/operators.h"
#include "twobp/nn/kernels/products/padded_rows.h"
#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/values.h"

namespace twobp {
namespace {

void check_labels(const at::Tensor& labels, int64_t classes, int64_t ignore) {
  const int64_t* target = labels.const_data_ptr<int64_t>();
  for (int64_t r = 0; r < labels.numel(); ++r) {
    TWOBP_CHECK(target[r] == ignore || (target[r] >= 0 && target[r] < classes), "label ", target[r], " at position ", r,
                " of the micro-batch is outside the vocabulary of ", classes);
  }
}

}  // namespace

void soft_cap(at::Tensor& logits, double cap) {
  if (by_operators(logits)) {
    operators::soft_cap(logits, cap);
    return;
  }
  const int64_t cols = logits.size(-1);
  dispatch_float(logits.scalar_type(), "CrossEntropy", [&](auto zero) {
    using S = decltype(zero);
    using T = Compute<S>;
    S* x = mutable_numbers<S>(logits);
    const int64_t stride = row_stride(logits);
    for_rows(logits.numel() / cols, cols, [&](int64_t begin, int64_t end) {
      std::vector<T> slope(static_cast<size_t>(cols));
      for (int64_t r = begin; r < end; ++r)
        kernels<S>().soft_cap(x + r * stride, slope.data(), cols, static_cast<T>(cap));
    });
  });
}

at::Tensor cross_entropy(at::Tensor& logits, const at::Tensor& labels, int64_t ignore, const LossFactor& scale,
                         bool gradient, double cap) {
  const int64_t cols = logits.size(-1);
  const int64_t rows = labels.numel();
  if (labels.is_cpu()) check_labels(labels, cols, ignore);
  if (by_operators(logits)) {
    const at::Tensor slope = cap > 0 ? operators::soft_cap(logits, cap) : at::Tensor();
    at::Tensor loss =
        operators::cross_entropy(logits, on_device(labels.view({-1}), logits.device()), ignore, scale, gradient);
    if (slope.defined() && gradient) logits.mul_(slope);
    return loss;
  }
  const double factor = scale.number();
  at::Tensor losses = at::empty({rows}, at::TensorOptions().dtype(at::kDouble));
  double* loss = losses.mutable_data_ptr<double>();
  const int64_t* target = labels.const_data_ptr<int64_t>();
  dispatch_float(logits.scalar_type(), "CrossEntropy", [&](auto zero) {
    using S = decltype(zero);
    using T = Compute<S>;
    S* x = mutable_numbers<S>(logits);
    const int64_t stride = row_stride(logits);
    for_rows(rows, cols, [&](int64_t begin, int64_t end) {
      if (cap > 0) {  // a row at a time, so that it is in the cache
        std::vector<T> slope(static_cast<size_t>(cols));
        for (int64_t r = begin; r < end; ++r) {
          S* const row = x + r * stride;
          kernels<S>().soft_cap(row, slope.data(), cols, static_cast<T>(cap));
          kernels<S>().cross_entropy(row, stride, target + r, loss + r, 1, cols, ignore, factor, gradient);
          if (gradient) kernels<S>().multiply(row, slope.data(), cols);
        }
        return;
      }
      kernels<S>().cross_entropy(x + begin * stride, stride, target + begin, loss + begin, end - begin, cols, ignore,
                                 factor, gradient);
    });
  });
  double sum = 0;
  for (int64_t r = 0; r < rows; ++r) sum += loss[r];
  return at::scalar_tensor(sum, at::TensorOptions().dtype(at::kDouble));
}

}  // namespace twobp
