#include "twobp/nn/layers/rms_norm.h"

#include <algorithm>

#include "twobp/nn/kernels/rows.h"

namespace twobp {
namespace {

// The gain's gradient is summed over blocks of so many rows, then over blocks: the same sum for any thread
// count.
constexpr int64_t kBlockRows = 64;

}  // namespace

RmsNorm::RmsNorm(std::string name, int64_t dim, double eps, at::ScalarType dtype)
    : gain_({{std::move(name), dim}}, {dim}, dtype, 0, 1), eps_(eps) {}

Values RmsNorm::forward(Values values, Context& context, Saved& saved) {
  at::Tensor x = as_contiguous(std::move(values[0]));
  const int64_t cols = x.size(-1);
  const int64_t rows = x.numel() / cols;
  TWOBP_CHECK(cols == gain_.value.numel(), "RmsNorm ", gain_.name(), " takes (..., ", gain_.value.numel(),
              "), got ", x.sizes());
  TWOBP_CHECK(x.scalar_type() == gain_.value.scalar_type(), "RmsNorm ", gain_.name(), " has dtype ",
              c10::toString(gain_.value.scalar_type()), ", got ", c10::toString(x.scalar_type()));
  at::Tensor y = context.output(x.sizes(), x.options());
  at::Tensor rstd = at::empty({rows}, x.options());
  dispatch_float(x.scalar_type(), "RmsNorm", [&](auto zero) {
    using T = decltype(zero);
    const T* from = x.const_data_ptr<T>();
    const T* gain = gain_.value.const_data_ptr<T>();
    T* to = y.mutable_data_ptr<T>();
    T* scale = rstd.mutable_data_ptr<T>();
    for_rows(rows, cols, [&](int64_t begin, int64_t end) {
      kernels<T>().rms_norm_forward(from + begin * cols, gain, to + begin * cols, scale + begin, end - begin,
                                    cols, eps_);
    });
  });
  if (context.training) {
    saved.keep_until_p1(std::move(x));
    saved.keep_until_p1(std::move(rstd));
  }
  return {std::move(y)};
}

Values RmsNorm::backward_p1(Values values, Context& context, Saved& saved) {
  const at::Tensor x = saved.take_p1(0);
  const at::Tensor rstd = saved.take_p1(1);
  at::Tensor dy = as_contiguous(std::move(values[0]));
  TWOBP_CHECK(dy.sizes() == x.sizes(), "the gradient ", dy.sizes(), " does not fit the output of RmsNorm ",
              gain_.name(), ", ", x.sizes());
  const int64_t cols = x.size(-1);
  const int64_t rows = x.numel() / cols;
  const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
  at::Tensor dx =
      context.destination == nullptr && exclusively_owned(dy) ? dy : context.output(x.sizes(), x.options());
  at::Tensor dgain = at::zeros({blocks, cols}, x.options());
  dispatch_float(x.scalar_type(), "RmsNorm", [&](auto zero) {
    using T = decltype(zero);
    const T* from = x.const_data_ptr<T>();
    const T* gradient = dy.const_data_ptr<T>();
    const T* gain = gain_.value.const_data_ptr<T>();
    const T* scale = rstd.const_data_ptr<T>();
    T* to = dx.mutable_data_ptr<T>();
    T* sums = dgain.mutable_data_ptr<T>();
    at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const int64_t row = block * kBlockRows;
        const int64_t count = std::min(kBlockRows, rows - row);
        kernels<T>().rms_norm_backward(gradient + row * cols, from + row * cols, gain, scale + row,
                                       to + row * cols, sums + block * cols, count, cols);
      }
    });
  });
  gain_.grad_to_add().add_(dgain.sum(0));
  return {std::move(dx)};
}

void RmsNorm::collect_parameters(std::vector<Parameter*>& parameters) {
  parameters.push_back(&gain_);
}

}  // namespace twobp
