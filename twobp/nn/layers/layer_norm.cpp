#include "twobp/nn/layers/layer_norm.h"

#include <algorithm>

#include "twobp/nn/kernels/encoder/encoder_kernels.h"
#include "twobp/nn/kernels/operators.h"
#include "twobp/nn/kernels/products/rows.h"

namespace twobp {
namespace {

// The parameters' gradients are summed over blocks of this many rows, then over the blocks. The sum is the same for any
// thread count.
constexpr int64_t kGainRows = 64;

// The number of rows that fit into the first-level cache together with the results computed from them.
int64_t cached_rows(int64_t cols) {
  return std::clamp<int64_t>(2048 / cols, 1, kGainRows);
}

}  // namespace

LayerNormRows::LayerNormRows(const std::string& name, int64_t dim, double eps, at::ScalarType dtype)
    : name_(name),
      gain_({{name + ".weight", dim}}, {dim}, compute_type(dtype), 0, 1),
      bias_({{name + ".bias", dim}}, {dim}, compute_type(dtype), 0),
      dtype_(dtype),
      eps_(eps) {}

void LayerNormRows::check(const at::Tensor& x) const {
  TWOBP_CHECK(x.dim() > 0 && x.size(-1) == dim(), "LayerNorm ", name_, " takes (..., ", dim(), "), got ", x.sizes());
  TWOBP_CHECK(x.scalar_type() == dtype_, "LayerNorm ", name_, " has dtype ", c10::toString(dtype_), ", got ",
              c10::toString(x.scalar_type()));
}

at::Tensor LayerNormRows::forward(const at::Tensor& x, at::Tensor& y, const Rows& before, const Rows& after) const {
  const int64_t cols = dim();
  const int64_t rows = x.numel() / cols;
  at::Tensor statistics = at::empty({2, rows}, gain_.value.options());
  if (by_operators(x)) {
    if (before) before(0, rows);
    operators::layer_norm_forward(x, gain_.value, bias_.value, eps_, y, statistics);
    if (after) after(0, rows);
    return statistics;
  }
  dispatch_float(dtype_, "LayerNorm", [&](auto zero) {
    using S = decltype(zero);
    const S* from = numbers<S>(x);
    const auto* gain = numbers<Compute<S>>(gain_.value);
    const auto* bias = numbers<Compute<S>>(bias_.value);
    S* to = mutable_numbers<S>(y);
    auto* mean = mutable_numbers<Compute<S>>(statistics);
    auto* rstd = mean + rows;
    for_rows(rows, cols, [&](int64_t first, int64_t last) {
      for (int64_t begin = first; begin < last;) {
        const int64_t end = std::min(last, begin + cached_rows(cols));
        if (before) before(begin, end);
        encoder_kernels<S>().layer_norm_forward(from + begin * cols, gain, bias, to + begin * cols, mean + begin,
                                                rstd + begin, end - begin, cols, eps_);
        if (after) after(begin, end);
        begin = end;
      }
    });
  });
  return statistics;
}

void LayerNormRows::backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& statistics, at::Tensor& dx,
                             const Rows& before, const Rows& after) {
  at::Tensor sums;  // of gain and bias
  if (by_operators(x)) {
    const int64_t rows = x.numel() / dim();
    if (before) before(0, rows);
    sums = operators::layer_norm_backward(dy, x, gain_.value, statistics, dx);
    if (after) after(0, rows);
  } else {
    sums = backward_rows(dy, x, statistics, dx, before, after);
  }
  if (gain_.trainable()) gain_.grad_to_add().add_(sums[0]);
  if (bias_.trainable()) bias_.grad_to_add().add_(sums[1]);
}

at::Tensor LayerNormRows::backward_rows(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& statistics,
                                        at::Tensor& dx, const Rows& before, const Rows& after) const {
  const int64_t cols = dim();
  const int64_t rows = x.numel() / cols;
  const int64_t blocks = (rows + kGainRows - 1) / kGainRows;
  const at::Tensor sums = at::zeros({2, blocks, cols}, gain_.value.options());
  dispatch_float(dtype_, "LayerNorm", [&](auto zero) {
    using S = decltype(zero);
    const S* from = numbers<S>(x);
    const S* gradient = numbers<S>(dy);
    const auto* gain = numbers<Compute<S>>(gain_.value);
    const auto* mean = numbers<Compute<S>>(statistics);
    const auto* rstd = mean + rows;
    S* to = mutable_numbers<S>(dx);
    auto* dgain = mutable_numbers<Compute<S>>(sums);
    auto* dbias = dgain + blocks * cols;
    at::parallel_for(0, blocks, 1, [&](int64_t first, int64_t last) {
      for (int64_t block = first; block < last; ++block) {
        const int64_t block_end = std::min(rows, (block + 1) * kGainRows);
        for (int64_t begin = block * kGainRows; begin < block_end;) {
          const int64_t end = std::min(block_end, begin + cached_rows(cols));
          if (before) before(begin, end);
          encoder_kernels<S>().layer_norm_backward(gradient + begin * cols, from + begin * cols, gain, mean + begin,
                                                   rstd + begin, to + begin * cols, dgain + block * cols,
                                                   dbias + block * cols, end - begin, cols);
          if (after) after(begin, end);
          begin = end;
        }
      }
    });
  });
  return sums.sum(1);
}

void LayerNormRows::collect_parameters(std::vector<Parameter*>& parameters) {
  parameters.push_back(&gain_);
  parameters.push_back(&bias_);
}

Values LayerNorm::forward(Values values, Context& context, Saved& saved) {
  at::Tensor x = as_contiguous(std::move(values[0]));
  norm_.check(x);
  at::Tensor y = at::empty(x.sizes(), x.options());
  at::Tensor statistics = norm_.forward(x, y);
  if (context.keeps()) {
    saved.keep_until_p1(std::move(x));
    saved.keep_until_p1(std::move(statistics));
  }
  return {std::move(y)};
}

Values LayerNorm::backward_p1(Values values, Context&, Saved& saved) {
  const at::Tensor x = saved.take_p1(0);
  const at::Tensor statistics = saved.take_p1(1);
  at::Tensor dy = as_contiguous(std::move(values[0]));
  TWOBP_CHECK(dy.sizes() == x.sizes(), "the gradient ", dy.sizes(), " does not fit the output of LayerNorm ",
              norm_.name(), ", ", x.sizes());
  at::Tensor dx = exclusively_owned(dy) ? dy : at::empty(x.sizes(), x.options());
  norm_.backward(dy, x, statistics, dx);
  return {std::move(dx)};
}

void LayerNorm::collect_parameters(std::vector<Parameter*>& parameters) {
  norm_.collect_parameters(parameters);
}

}  // namespace twobp
