#include "twobp/nn/kernels/rms_norm.h"

#include <algorithm>

#include "twobp/nn/kernels/operators.h"
#include "twobp/nn/kernels/products/rows.h"

namespace twobp {
namespace {

// The gain's gradient is summed over blocks of this many rows, then over the blocks. The sum is the same for any thread
// count.
constexpr int64_t kGainBlockRows = 64;

at::Tensor norm_backward_rows(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
                              const at::Tensor& rstd, at::Tensor& dx) {
  const int64_t cols = x.size(-1);
  const int64_t rows = x.numel() / cols;
  const int64_t blocks = (rows + kGainBlockRows - 1) / kGainBlockRows;
  const at::Tensor dgain = at::zeros({blocks, cols}, weight.options());
  dispatch_float(x.scalar_type(), "RmsNorm", [&](auto zero) {
    using S = decltype(zero);
    const S* from = numbers<S>(x);
    const S* gradient = numbers<S>(dy);
    const auto* gain = numbers<Compute<S>>(weight);
    const auto* scale = numbers<Compute<S>>(rstd);
    S* to = mutable_numbers<S>(dx);
    auto* sums = mutable_numbers<Compute<S>>(dgain);
    at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const int64_t row = block * kGainBlockRows;
        const int64_t count = std::min(kGainBlockRows, rows - row);
        kernels<S>().rms_norm_backward(gradient + row * cols, from + row * cols, gain, scale + row, to + row * cols,
                                       sums + block * cols, count, cols);
      }
    });
  });
  return dgain.sum(0);
}

}  // namespace

std::pair<at::Tensor, at::Tensor> rms_norm(const at::Tensor& x, const at::Tensor& gain, double eps) {
  const int64_t cols = x.size(-1);
  const int64_t rows = x.numel() / cols;
  at::Tensor y = at::empty(x.sizes(), x.options());
  at::Tensor rstd = at::empty({rows}, gain.options());
  if (by_operators(x)) {
    operators::rms_norm_forward(x, gain, eps, y, rstd);
  } else {
    dispatch_float(x.scalar_type(), "RmsNorm", [&](auto zero) {
      using S = decltype(zero);
      const S* from = numbers<S>(x);
      const auto* weight = numbers<Compute<S>>(gain);
      S* to = mutable_numbers<S>(y);
      auto* scale = mutable_numbers<Compute<S>>(rstd);
      for_rows(rows, cols, [&](int64_t begin, int64_t end) {
        kernels<S>().rms_norm_forward(from + begin * cols, weight, to + begin * cols, scale + begin, end - begin, cols,
                                      eps);
      });
    });
  }
  return {std::move(y), std::move(rstd)};
}

at::Tensor rms_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& gain, const at::Tensor& rstd,
                             at::Tensor& dx) {
  return by_operators(x) ? operators::rms_norm_backward(dy, x, gain, rstd, dx)
                         : norm_backward_rows(dy, x, gain, rstd, dx);
}

}  // namespace twobp
