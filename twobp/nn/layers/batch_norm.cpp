#include "twobp/nn/layers/batch_norm.h"

#include <cmath>

#include "twobp/nn/kernels/image/image_operators.h"
#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/kernels/rows/operators.h"

namespace twobp {
namespace {

// Sums are taken over blocks of this many rows, then over the blocks. The result is the same for any thread count.
constexpr int64_t kStatisticsRows = 64;

int64_t rows_in(const at::Tensor& x) {
  return x.numel() / x.size(-1);
}

int64_t blocks_of(int64_t rows) {
  return (rows + kStatisticsRows - 1) / kStatisticsRows;
}

template <typename T>
ChannelScales<T> scales_of(const at::Tensor& scales) {
  if (!scales.defined()) return {nullptr, nullptr, nullptr, nullptr};
  const T* first = numbers<T>(scales);
  const int64_t cols = scales.size(1);
  return {first, first + cols, first + 2 * cols, first + 3 * cols};
}

// Calls body(block, first row, rows).
template <typename Body>
void for_blocks(int64_t rows, int64_t cols, Body&& body) {
  const int64_t grain = std::max<int64_t>(1, 16384 / (kStatisticsRows * cols));
  at::parallel_for(0, blocks_of(rows), grain, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kStatisticsRows;
      body(block, first, std::min(kStatisticsRows, rows - first));
    }
  });
}

}  // namespace

BatchNormRows::BatchNormRows(const std::string& name, int64_t channels, at::ScalarType dtype, double eps,
                             double momentum)
    : gain_({{name + ".weight", channels}}, {channels}, compute_type(dtype), 0, 1),
      bias_({{name + ".bias", channels}}, {channels}, compute_type(dtype), 0, 0),
      running_mean_(Parameter::buffer(name + ".running_mean", {channels}, compute_type(dtype), 0)),
      running_var_(Parameter::buffer(name + ".running_var", {channels}, compute_type(dtype), 1)),
      count_(Parameter::buffer(name + ".num_batches_tracked", {}, at::kLong, 0)),
      dtype_(dtype),
      eps_(eps),
      momentum_(momentum) {}

void BatchNormRows::collect_parameters(std::vector<Parameter*>& parameters) {
  for (Parameter* parameter : {&gain_, &bias_, &running_mean_, &running_var_, &count_}) {
    parameters.push_back(parameter);
  }
}

// The blocks' means and squared distances are joined as in Chan, Golub and LeVeque, "Updating formulae and a pairwise
// algorithm for computing sample variances" (1979).
void BatchNormRows::batch_statistics(const at::Tensor& x, double* mean, double* variance) {
  const int64_t cols = x.size(-1);
  const int64_t rows = rows_in(x);
  const int64_t blocks = blocks_of(rows);
  at::Tensor partial = at::empty({blocks, 2, cols}, gain_.value.options());
  dispatch_float(x.scalar_type(), "BatchNorm", [&](auto zero) {
    using S = decltype(zero);
    using T = Compute<S>;
    const S* from = numbers<S>(x);
    T* to = mutable_numbers<T>(partial);
    for_blocks(rows, cols, [&](int64_t block, int64_t first, int64_t count) {
      T* sums = to + block * 2 * cols;
      image_kernels<S>().channel_moments(from + first * cols, sums, sums + cols, count, cols);
    });
    std::fill(mean, mean + cols, 0);
    std::fill(variance, variance + cols, 0);
    for (int64_t block = 0; block < blocks; ++block) {
      const T* sums = to + block * 2 * cols;
      const auto count = static_cast<double>(std::min(kStatisticsRows, rows - block * kStatisticsRows));
      for (int64_t c = 0; c < cols; ++c) mean[c] += count * double(sums[c]);
    }
    for (int64_t c = 0; c < cols; ++c) mean[c] /= static_cast<double>(rows);
    for (int64_t block = 0; block < blocks; ++block) {
      const T* sums = to + block * 2 * cols;
      const auto count = static_cast<double>(std::min(kStatisticsRows, rows - block * kStatisticsRows));
      for (int64_t c = 0; c < cols; ++c) {
        const double off = double(sums[c]) - mean[c];
        variance[c] += double(sums[cols + c]) + count * off * off;
      }
    }
    for (int64_t c = 0; c < cols; ++c) variance[c] /= static_cast<double>(rows);
  });
}

at::Tensor BatchNormRows::scales(const at::Tensor& x, const Context& context) {
  const int64_t cols = gain_.value.numel();
  TWOBP_CHECK(x.dim() >= 2 && x.size(-1) == cols && x.numel() > 0, "BatchNorm ", name(), " takes (..., ", cols,
              "), got ", x.sizes());
  TWOBP_CHECK(x.scalar_type() == dtype_, "BatchNorm ", name(), " has dtype ", c10::toString(dtype_), ", got ",
              c10::toString(x.scalar_type()));
  const int64_t rows = rows_in(x);
  TWOBP_CHECK(!context.training || rows > 1, "BatchNorm ", name(), " has only one value per channel in micro-batch ",
              context.micro_batch, ", which has no variance: use a larger pipeline.micro_batch_size or larger images");
  if (by_operators(x)) return scales_by_operators(x, context.training);
  at::Tensor scales = at::empty({4, cols}, gain_.value.options());
  dispatch_float(gain_.value.scalar_type(), "BatchNorm", [&](auto zero) {
    using T = decltype(zero);
    if constexpr (std::is_same_v<T, Compute<T>>) {
      std::vector<double> mean(cols);
      std::vector<double> variance(cols);
      T* running_mean = mutable_numbers<T>(running_mean_.value);
      T* running_var = mutable_numbers<T>(running_var_.value);
      if (context.training) {
        batch_statistics(x, mean.data(), variance.data());
        const double unbiased = static_cast<double>(rows) / static_cast<double>(rows - 1);
        for (int64_t c = 0; c < cols; ++c) {
          running_mean[c] = T((1 - momentum_) * double(running_mean[c]) + momentum_ * mean[c]);
          running_var[c] = T((1 - momentum_) * double(running_var[c]) + momentum_ * variance[c] * unbiased);
        }
        ++*count_.value.mutable_data_ptr<int64_t>();
      } else {
        std::copy(running_mean, running_mean + cols, mean.begin());
        std::copy(running_var, running_var + cols, variance.begin());
      }
      const T* gain = numbers<T>(gain_.value);
      const T* bias = numbers<T>(bias_.value);
      T* to = mutable_numbers<T>(scales);
      for (int64_t c = 0; c < cols; ++c) {
        const double rstd = 1 / std::sqrt(variance[c] + eps_);
        const double scale = double(gain[c]) * rstd;
        to[c] = T(mean[c]);
        to[cols + c] = T(rstd);
        to[2 * cols + c] = T(scale);
        to[3 * cols + c] = T(double(bias[c]) - mean[c] * scale);
      }
    }
  });
  return scales;
}

at::Tensor BatchNormRows::scales_by_operators(const at::Tensor& x, bool training) {
  at::Tensor mean = running_mean_.value;
  at::Tensor variance = running_var_.value;
  if (training) {
    std::tie(mean, variance) = operators::channel_moments(x);
    const auto rows = static_cast<double>(rows_in(x));
    running_mean_.value.mul_(1 - momentum_).add_(mean, momentum_);
    running_var_.value.mul_(1 - momentum_).add_(variance, momentum_ * rows / (rows - 1));
    count_.value.add_(1);
  }
  const at::Tensor rstd = (variance + eps_).rsqrt_();
  const at::Tensor scale = gain_.value * rstd;
  return at::stack({mean, rstd, scale, bias_.value - mean * scale});
}

void BatchNormRows::apply(const at::Tensor& x, const at::Tensor& scales, const at::Tensor& y, bool relu) const {
  if (by_operators(x)) return operators::channel_scale(x, scales, y, relu);
  const int64_t cols = x.size(-1);
  dispatch_float(x.scalar_type(), "BatchNorm", [&](auto zero) {
    using S = decltype(zero);
    const S* from = numbers<S>(x);
    S* to = mutable_numbers<S>(y);
    const auto of = scales_of<Compute<S>>(scales);
    for_rows(rows_in(x), cols, [&](int64_t begin, int64_t end) {
      image_kernels<S>().channel_scale(from + begin * cols, of, to + begin * cols, relu, end - begin, cols);
    });
  });
}

void BatchNormRows::apply_add_relu(const at::Tensor& x, const at::Tensor& scales, const at::Tensor& other,
                                   const at::Tensor& other_scales, const at::Tensor& y) const {
  if (by_operators(x)) return operators::channel_scale_add_relu(x, scales, other, other_scales, y);
  const int64_t cols = x.size(-1);
  dispatch_float(x.scalar_type(), "BatchNorm", [&](auto zero) {
    using S = decltype(zero);
    const S* from = numbers<S>(x);
    const S* added = numbers<S>(other);
    S* to = mutable_numbers<S>(y);
    const auto of = scales_of<Compute<S>>(scales);
    const auto of_other = scales_of<Compute<S>>(other_scales);
    for_rows(rows_in(x), cols, [&](int64_t begin, int64_t end) {
      const int64_t at = begin * cols;
      image_kernels<S>().channel_scale_add_relu(from + at, of, added + at, of_other, to + at, end - begin, cols);
    });
  });
}

// blocks (blocks, 2, channels): sums of g and of g * (x - mean) / deviation.
at::Tensor BatchNormRows::finish_sums(const at::Tensor& blocks, int64_t rows, const at::Tensor& scales) {
  const int64_t cols = blocks.size(2);
  at::Tensor means = at::empty({2, cols}, blocks.options());
  dispatch_float(blocks.scalar_type(), "BatchNorm", [&](auto zero) {
    using T = decltype(zero);
    if constexpr (std::is_same_v<T, Compute<T>>) {
      std::vector<double> sums(2 * cols, 0);
      const T* from = numbers<T>(blocks);
      for (int64_t block = 0; block < blocks.size(0); ++block) {
        for (int64_t c = 0; c < 2 * cols; ++c) sums[c] += double(from[block * 2 * cols + c]);
      }
      T* bias = bias_.trainable() ? mutable_numbers<T>(bias_.grad_to_add()) : nullptr;
      T* gain = gain_.trainable() ? mutable_numbers<T>(gain_.grad_to_add()) : nullptr;
      const T* rstd = scales_of<T>(scales).rstd;
      T* to = mutable_numbers<T>(means);
      const double share = 1 / static_cast<double>(rows);
      for (int64_t c = 0; c < cols; ++c) {
        if (bias != nullptr) bias[c] += T(sums[c]);
        if (gain != nullptr) gain[c] += T(sums[cols + c]);
        to[c] = T(sums[c] * share);
        to[cols + c] = T(sums[cols + c] * share * double(rstd[c]));
      }
    }
  });
  return means;
}

at::Tensor BatchNormRows::finish_by_operators(const at::Tensor& sums, int64_t rows, const at::Tensor& scales) {
  if (bias_.trainable()) bias_.grad_to_add().add_(sums[0]);
  if (gain_.trainable()) gain_.grad_to_add().add_(sums[1]);
  return at::stack({sums[0], sums[1] * scales[1]}).div_(static_cast<double>(rows));
}

at::Tensor BatchNormRows::backward_sums(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& scales,
                                        bool relu) {
  TWOBP_CHECK(dy.sizes() == x.sizes(), "the gradient ", dy.sizes(), " does not fit the output of BatchNorm ", name(),
              ", ", x.sizes());
  const int64_t cols = x.size(-1);
  const int64_t rows = rows_in(x);
  if (by_operators(x)) return finish_by_operators(operators::channel_sums(dy, x, scales, relu), rows, scales);
  at::Tensor blocks = at::zeros({blocks_of(rows), 2, cols}, scales.options());
  dispatch_float(x.scalar_type(), "BatchNorm", [&](auto zero) {
    using S = decltype(zero);
    const S* gradient = numbers<S>(dy);
    const S* from = numbers<S>(x);
    auto* to = mutable_numbers<Compute<S>>(blocks);
    const auto of = scales_of<Compute<S>>(scales);
    for_blocks(rows, cols, [&](int64_t block, int64_t first, int64_t count) {
      auto* sums = to + block * 2 * cols;
      image_kernels<S>().channel_sums(gradient + first * cols, from + first * cols, of, sums, sums + cols, relu, count,
                                      cols);
    });
  });
  return finish_sums(blocks, rows, scales);
}

at::Tensor BatchNormRows::backward_sums_add_relu(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& scales,
                                                 const at::Tensor& other, const at::Tensor& other_scales,
                                                 const at::Tensor& g) {
  TWOBP_CHECK(dy.sizes() == x.sizes(), "the gradient ", dy.sizes(), " does not fit the output of BatchNorm ", name(),
              ", ", x.sizes());
  const int64_t cols = x.size(-1);
  const int64_t rows = rows_in(x);
  if (by_operators(x)) {
    const at::Tensor sums = operators::channel_sums_add_relu(dy, x, scales, other, other_scales, g);
    return finish_by_operators(sums, rows, scales);
  }
  at::Tensor blocks = at::zeros({blocks_of(rows), 2, cols}, scales.options());
  dispatch_float(x.scalar_type(), "BatchNorm", [&](auto zero) {
    using S = decltype(zero);
    const S* gradient = numbers<S>(dy);
    const S* from = numbers<S>(x);
    const S* added = numbers<S>(other);
    S* before = mutable_numbers<S>(g);
    auto* to = mutable_numbers<Compute<S>>(blocks);
    const auto of = scales_of<Compute<S>>(scales);
    const auto of_other = scales_of<Compute<S>>(other_scales);
    for_blocks(rows, cols, [&](int64_t block, int64_t first, int64_t count) {
      auto* sums = to + block * 2 * cols;
      const int64_t at = first * cols;
      image_kernels<S>().channel_sums_add_relu(gradient + at, from + at, of, added + at, of_other, before + at, sums,
                                               sums + cols, count, cols);
    });
  });
  return finish_sums(blocks, rows, scales);
}

void BatchNormRows::backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& scales,
                             const at::Tensor& sums, bool relu, const at::Tensor& dx, const at::Tensor& y) const {
  if (by_operators(x)) return operators::channel_backward(dy, x, scales, sums, relu, dx, y);
  const int64_t cols = x.size(-1);
  dispatch_float(x.scalar_type(), "BatchNorm", [&](auto zero) {
    using S = decltype(zero);
    using T = Compute<S>;
    const S* gradient = numbers<S>(dy);
    const S* from = numbers<S>(x);
    S* to = mutable_numbers<S>(dx);
    S* again = y.defined() ? mutable_numbers<S>(y) : nullptr;
    const auto of = scales_of<T>(scales);
    const T* means = numbers<T>(sums);
    for_rows(rows_in(x), cols, [&](int64_t begin, int64_t end) {
      const int64_t at = begin * cols;
      image_kernels<S>().channel_backward(gradient + at, from + at, of, means, means + cols, to + at,
                                          again == nullptr ? nullptr : again + at, relu, end - begin, cols);
    });
  });
}

at::Tensor BatchNormRows::forward(Values values, bool relu, Context& context, Saved& saved) {
  at::Tensor x = as_contiguous(std::move(values[0]));
  at::Tensor scales = this->scales(x, context);
  at::Tensor y = !context.keeps() && exclusively_owned(x) ? x : at::empty_like(x);
  apply(x, scales, y, relu);
  if (context.keeps()) {
    saved.keep_until_p1(std::move(x));
    saved.keep_until_p1(std::move(scales));
  }
  return y;
}

Values BatchNorm2d::forward(Values values, Context& context, Saved& saved) {
  return {norm_.forward(std::move(values), relu_, context, saved)};
}

Values BatchNorm2d::backward_p1(Values values, Context&, Saved& saved) {
  const auto [x, scales] = BatchNormRows::take(saved);
  at::Tensor dy = as_contiguous(std::move(values[0]));
  const at::Tensor sums = norm_.backward_sums(dy, x, scales, relu_);
  at::Tensor dx = exclusively_owned(dy) ? dy : exclusively_owned(x) ? x : at::empty_like(x);
  norm_.backward(dy, x, scales, sums, relu_, dx);
  return {std::move(dx)};
}

}  // namespace twobp
