#include "twobp/nn/layers/rms_norm.h"

#include <algorithm>

#include "twobp/nn/kernels/operators.h"
#include "twobp/nn/kernels/products/rows.h"

namespace twobp {
namespace {

// The gain's gradient is summed over blocks of this many rows, then over the blocks. The sum is the same for
// any thread count.
constexpr int64_t kBlockRows = 64;

}  // namespace

RmsNorm::RmsNorm(std::string name, int64_t dim, double eps, at::ScalarType dtype)
    : gain_({{std::move(name), dim}}, {dim}, compute_type(dtype), 0, 1), dtype_(dtype), eps_(eps) {}

Values RmsNorm::forward(Values values, Context& context, Saved& saved) {
  at::Tensor x = as_contiguous(std::move(values[0]));
  const int64_t cols = x.size(-1);
  const int64_t rows = x.numel() / cols;
  TWOBP_CHECK(cols == gain_.value.numel(), "RmsNorm ", gain_.name(), " takes (..., ", gain_.value.numel(),
              "), got ", x.sizes());
  TWOBP_CHECK(x.scalar_type() == dtype_, "RmsNorm ", gain_.name(), " has dtype ", c10::toString(dtype_),
              ", got ", c10::toString(x.scalar_type()));
  at::Tensor y = at::empty(x.sizes(), x.options());
  at::Tensor rstd = at::empty({rows}, gain_.value.options());
  if (by_operators(x)) {
    operators::rms_norm_forward(x, gain_.value, eps_, y, rstd);
  } else {
    dispatch_float(x.scalar_type(), "RmsNorm", [&](auto zero) {
      using S = decltype(zero);
      const S* from = numbers<S>(x);
      const auto* gain = numbers<Compute<S>>(gain_.value);
      S* to = mutable_numbers<S>(y);
      auto* scale = mutable_numbers<Compute<S>>(rstd);
      for_rows(rows, cols, [&](int64_t begin, int64_t end) {
        kernels<S>().rms_norm_forward(from + begin * cols, gain, to + begin * cols, scale + begin,
                                      end - begin, cols, eps_);
      });
    });
  }
  if (context.keeps()) {
    saved.keep_until_p1(std::move(x));
    saved.keep_until_p1(std::move(rstd));
  }
  return {std::move(y)};
}

Values RmsNorm::backward_p1(Values values, Context&, Saved& saved) {
  const at::Tensor x = saved.take_p1(0);
  const at::Tensor rstd = saved.take_p1(1);
  at::Tensor dy = as_contiguous(std::move(values[0]));
  TWOBP_CHECK(dy.sizes() == x.sizes(), "the gradient ", dy.sizes(), " does not fit the output of RmsNorm ",
              gain_.name(), ", ", x.sizes());
  at::Tensor dx = exclusively_owned(dy) ? dy : at::empty(x.sizes(), x.options());
  const at::Tensor dgain = by_operators(x) ? operators::rms_norm_backward(dy, x, gain_.value, rstd, dx)
                                           : backward_rows(dy, x, rstd, dx);
  if (gain_.trainable()) gain_.grad_to_add().add_(dgain);
  return {std::move(dx)};
}

at::Tensor RmsNorm::backward_rows(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& rstd,
                                  at::Tensor& dx) const {
  const int64_t cols = x.size(-1);
  const int64_t rows = x.numel() / cols;
  const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
  const at::Tensor dgain = at::zeros({blocks, cols}, gain_.value.options());
  dispatch_float(x.scalar_type(), "RmsNorm", [&](auto zero) {
    using S = decltype(zero);
    const S* from = numbers<S>(x);
    const S* gradient = numbers<S>(dy);
    const auto* gain = numbers<Compute<S>>(gain_.value);
    const auto* scale = numbers<Compute<S>>(rstd);
    S* to = mutable_numbers<S>(dx);
    auto* sums = mutable_numbers<Compute<S>>(dgain);
    at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const int64_t row = block * kBlockRows;
        const int64_t count = std::min(kBlockRows, rows - row);
        kernels<S>().rms_norm_backward(gradient + row * cols, from + row * cols, gain, scale + row,
                                       to + row * cols, sums + block * cols, count, cols);
      }
    });
  });
  return dgain.sum(0);
}

void RmsNorm::collect_parameters(std::vector<Parameter*>& parameters) {
  parameters.push_back(&gain_);
}

}  // namespace twobp
