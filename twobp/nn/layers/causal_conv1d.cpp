#include <algorithm>
#include <cmath>

#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/kernels/rows/operators.h"
#include "twobp/nn/kernels/scan/scan_operators.h"
#include "twobp/nn/layers/mamba_mixer.h"

namespace twobp {

CausalConv1d::CausalConv1d(const std::string& name, int64_t channels, int64_t kernel, at::ScalarType dtype)
    : weight_({{name + ".weight", channels}}, {channels, 1, kernel}, compute_type(dtype), 0),
      bias_({{name + ".bias", channels}}, {channels}, compute_type(dtype), 0),
      dtype_(dtype),
      channels_(channels),
      kernel_(kernel) {
  TWOBP_CHECK(kernel >= 1 && kernel <= kMaxConvKernel, "CausalConv1d ", name, " has a kernel of ", kernel,
              ", but it must be from 1 to ", kMaxConvKernel);
  const double bound = 1 / std::sqrt(static_cast<double>(kernel));
  weight_.initialize_with(
      [bound](at::Tensor& rows, at::Generator& generator) { rows.uniform_(-bound, bound, generator); });
}

at::Tensor CausalConv1d::convolve(const at::Tensor& x, at::Tensor y) const {
  const at::Tensor weight = weight_.value.view({channels_, kernel_}).t().contiguous();
  if (by_operators(x)) {
    operators::conv_forward(x, weight, bias_.value, y);
    return y;
  }
  dispatch_float(x.scalar_type(), "CausalConv1d", [&](auto zero) {
    using S = decltype(zero);
    const int64_t positions = x.size(1);
    for_rows(x.size(0) * positions, channels_, [&](int64_t begin, int64_t end) {
      // Goes through whole and partial sequences.
      for (int64_t row = begin; row < end;) {
        const int64_t sequence = row / positions;
        const int64_t stop = std::min(end, (sequence + 1) * positions);
        const ConvInput<S> in = {positions,
                                 channels_,
                                 kernel_,
                                 rows_of<const S>(x, sequence),
                                 numbers<Compute<S>>(weight),
                                 numbers<Compute<S>>(bias_.value)};
        scan_kernels<S>().conv_forward(in, rows_of<S>(y, sequence), row - sequence * positions,
                                       stop - sequence * positions);
        row = stop;
      }
    });
  });
  return y;
}

Values CausalConv1d::forward(Values values, Context& context, Saved& saved) {
  at::Tensor x = with_dense_rows(std::move(values[0]));
  TWOBP_CHECK(x.dim() == 3 && x.size(2) == channels_, "CausalConv1d ", weight_.name(), " takes (batch, sequence, ",
              channels_, "), got ", x.sizes());
  TWOBP_CHECK(x.scalar_type() == dtype_, "CausalConv1d ", weight_.name(), " has dtype ", c10::toString(dtype_),
              ", got ", c10::toString(x.scalar_type()));
  at::Tensor y = convolve(x, at::empty(x.sizes(), x.options()));
  if (context.sliced()) go_on(x, y, saved);
  if (context.keeps()) saved.keep_until_p1(std::move(x));
  return {std::move(y)};
}

at::Tensor CausalConv1d::inputs_before(const Saved& saved, const at::Tensor& x) const {
  if (saved.previous() == nullptr) return at::zeros({x.size(0), kernel_ - 1, channels_}, x.options());
  TWOBP_CHECK(saved.previous()->to_later.size() == 1, "CausalConv1d ", weight_.name(),
              " over a slice does not find the last inputs of the previous slice");
  return saved.previous()->to_later[0];
}

// Only the first kernel - 1 outputs read inputs of earlier slices.
void CausalConv1d::go_on(const at::Tensor& x, at::Tensor& y, Saved& saved) const {
  const int64_t before = kernel_ - 1;
  const at::Tensor past = inputs_before(saved, x);
  const int64_t count = std::min(before, x.size(1));
  if (saved.previous() != nullptr && count > 0) {
    const at::Tensor begin = at::cat({past, x.narrow(1, 0, count)}, 1);
    y.narrow(1, 0, count).copy_(convolve(begin, at::empty(begin.sizes(), begin.options())).narrow(1, before, count));
  }
  saved.to_later = {at::cat({past.narrow(1, count, before - count), x.narrow(1, x.size(1) - count, count)}, 1)};
}

// Over the inputs before the slice and its own, so that gradients pass between slices.
void CausalConv1d::backward_slice(const at::Tensor& x, const at::Tensor& dy, const at::Tensor& dx, Saved& saved) {
  const int64_t before = kernel_ - 1;
  const at::Tensor past = inputs_before(saved, x);
  const at::Tensor all = at::cat({past, x}, 1);
  const at::Tensor dall = at::empty(all.sizes(), all.options());
  backward(all, at::cat({at::zeros_like(past), dy}, 1), dall);
  if (!saved.from_later.empty()) dall.narrow(1, x.size(1), before).add_(saved.from_later[0]);
  saved.to_later.clear();
  saved.from_later.clear();
  if (saved.previous() != nullptr) saved.previous()->from_later = {dall.narrow(1, 0, before).clone()};
  dx.copy_(dall.narrow(1, before, x.size(1)));
}

void CausalConv1d::backward(const at::Tensor& x, const at::Tensor& dy, const at::Tensor& dx) {
  TWOBP_CHECK(dy.sizes() == x.sizes(), "the gradient ", dy.sizes(), " does not fit the output of CausalConv1d ",
              weight_.name(), ", ", x.sizes());
  const int64_t batch = x.size(0);
  const at::Tensor weight = weight_.value.view({channels_, kernel_}).t().contiguous();
  const at::Tensor dweight = at::empty({batch, kernel_, channels_}, weight.options());
  const at::Tensor dbias = at::empty({batch, channels_}, weight.options());
  if (by_operators(x)) {
    operators::conv_backward(x, weight, bias_.value, dy, dx, dweight, dbias);
  } else {
    backward_groups(x, weight, dy, dx, dweight, dbias);
  }
  if (weight_.trainable()) {
    weight_.grad_to_add().view({channels_, kernel_}).add_(sum_in_order(dweight).t());
  }
  if (bias_.trainable()) bias_.grad_to_add().add_(sum_in_order(dbias));
}

void CausalConv1d::backward_groups(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& dy,
                                   const at::Tensor& dx, const at::Tensor& dweight, const at::Tensor& dbias) const {
  const int64_t batch = x.size(0);
  const int64_t groups = (channels_ + kScanGroup - 1) / kScanGroup;
  dispatch_float(x.scalar_type(), "CausalConv1d", [&](auto zero) {
    using S = decltype(zero);
    using T = Compute<S>;
    at::parallel_for(0, batch * groups, 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t sequence = task / groups;
        const int64_t channel = task % groups * kScanGroup;
        const ConvInput<S> in = {
            x.size(1), channels_, kernel_, rows_of<const S>(x, sequence), numbers<T>(weight), numbers<T>(bias_.value)};
        scan_kernels<S>().conv_backward(in, rows_of<const S>(dy, sequence), rows_of<S>(dx, sequence),
                                        mutable_numbers<T>(dweight) + sequence * kernel_ * channels_,
                                        mutable_numbers<T>(dbias) + sequence * channels_, channel,
                                        std::min(channel + kScanGroup, channels_));
      }
    });
  });
}

Values CausalConv1d::backward_p1(Values dy, Context& context, Saved& saved) {
  at::Tensor x = saved.take_p1(0);
  at::Tensor dx = exclusively_owned(x) ? x : at::empty(x.sizes(), x.options());
  backward_into(dx, x, std::move(dy[0]), context, saved);
  return {std::move(dx)};
}

void CausalConv1d::backward_p1_into(const at::Tensor& dx, at::Tensor dy, Context& context, Saved& saved) {
  backward_into(dx, saved.take_p1(0), std::move(dy), context, saved);
}

void CausalConv1d::backward_into(const at::Tensor& dx, const at::Tensor& x, at::Tensor dy, Context& context,
                                 Saved& saved) {
  dy = with_dense_rows(std::move(dy));
  if (context.sliced()) return backward_slice(x, dy, dx, saved);
  backward(x, dy, dx);
}

void CausalConv1d::collect_parameters(std::vector<Parameter*>& parameters) {
  parameters.push_back(&weight_);
  parameters.push_back(&bias_);
}

}  // namespace twobp
