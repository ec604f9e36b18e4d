#include "twobp/nn/kernels/rows/rows_by_cuda.h"

#include <algorithm>
#include <limits>
#include <optional>

#include <c10/core/DeviceGuard.h>

#include "twobp/core/check.h"
#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/kernels/rows/row_kernels_cuda.h"

namespace twobp {
namespace {

constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();
constexpr int64_t kMostColumns = int64_t{65535} * 64;  // of a gain's gradient

std::optional<CudaNumber> number_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return CudaNumber::kFloat;
    case at::kDouble:
      return CudaNumber::kDouble;
    case at::kBFloat16:
      return CudaNumber::kBFloat16;
    case at::kHalf:
      return CudaNumber::kHalf;
    default:
      return {};
  }
}

// Undefined if the kernels do not take rows of `cols` numbers like those of x.
std::optional<CudaRows> rows_of(const at::Tensor& x, int64_t cols) {
  if (!x.is_cuda() || x.numel() == 0) return {};
  const std::optional<CudaNumber> number = number_of(x.scalar_type());
  const int64_t rows = x.numel() / x.size(-1);
  if (!number || rows > kMostRows || cols > kMostColumns) return {};
  return CudaRows{*number, rows, cols, current_stream(x)};
}

// Whether they are what the kernels take as pointers: dense, of this type.
bool dense(std::initializer_list<at::Tensor> tensors, at::ScalarType type) {
  return std::ranges::all_of(tensors,
                             [&](const at::Tensor& one) { return one.is_contiguous() && one.scalar_type() == type; });
}

at::ScalarType wide_type(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

bool queued(int error) {
  TWOBP_CHECK(error == 0, "CUDA cannot launch a kernel for rows: CUDA error ", error);
  return true;
}

}  // namespace

bool rows_by_cuda() {
  return true;
}

bool rms_norm_forward_by_cuda(const at::Tensor& x, const at::Tensor& gain, double eps, at::Tensor& y,
                              at::Tensor& rstd) {
  const auto on = rows_of(x, x.size(-1));
  if (!on || !dense({x, y}, x.scalar_type()) || !dense({gain, rstd}, wide_type(x))) return false;
  const c10::DeviceGuard here(x.device());
  return queued(cuda_rms_norm_forward(*on, x.const_data_ptr(), gain.const_data_ptr(), eps, y.mutable_data_ptr(),
                                      rstd.mutable_data_ptr()));
}

bool rms_norm_backward_by_cuda(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& gain,
                               const at::Tensor& rstd, at::Tensor& dx, at::Tensor& dgain) {
  const auto on = rows_of(x, x.size(-1));
  if (!on || !dense({dy, x, dx}, x.scalar_type()) || !dense({gain, rstd}, wide_type(x))) return false;
  const c10::DeviceGuard here(x.device());
  const at::Tensor sums = at::empty({cuda_gain_blocks(on->rows), on->cols}, gain.options());
  queued(cuda_rms_norm_backward(*on, dy.const_data_ptr(), x.const_data_ptr(), gain.const_data_ptr(),
                                rstd.const_data_ptr(), dx.mutable_data_ptr(), sums.mutable_data_ptr()));
  dgain = sums.sum(0);
  return true;
}

bool layer_norm_forward_by_cuda(const at::Tensor& x, const at::Tensor& gain, const at::Tensor& bias, double eps,
                                at::Tensor& y, at::Tensor& statistics) {
  const auto on = rows_of(x, x.size(-1));
  if (!on || !dense({x, y}, x.scalar_type()) || !dense({gain, bias, statistics}, wide_type(x))) return false;
  const c10::DeviceGuard here(x.device());
  return queued(cuda_layer_norm_forward(*on, x.const_data_ptr(), gain.const_data_ptr(), bias.const_data_ptr(), eps,
                                        y.mutable_data_ptr(), statistics.mutable_data_ptr()));
}

bool layer_norm_backward_by_cuda(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& gain,
                                 const at::Tensor& statistics, at::Tensor& dx, at::Tensor& sums) {
  const auto on = rows_of(x, x.size(-1));
  if (!on || !dense({dy, x, dx}, x.scalar_type()) || !dense({gain, statistics}, wide_type(x))) return false;
  const c10::DeviceGuard here(x.device());
  const at::Tensor of_blocks = at::empty({2, cuda_gain_blocks(on->rows), on->cols}, gain.options());
  queued(cuda_layer_norm_backward(*on, dy.const_data_ptr(), x.const_data_ptr(), gain.const_data_ptr(),
                                  statistics.const_data_ptr(), dx.mutable_data_ptr(), of_blocks.mutable_data_ptr()));
  sums = of_blocks.sum(1);
  return true;
}

bool rope_by_cuda(at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, const RowHeads& heads,
                  double direction) {
  const auto on = rows_of(x, x.size(-1));
  if (!on || !has_even_rows(x) || !dense({cos, sin}, wide_type(x))) return false;
  const c10::DeviceGuard here(x.device());
  const CudaRope rope = {row_stride(x), heads.count, heads.step, heads.first, cos.size(1), x.size(1), direction};
  return queued(cuda_rope(*on, rope, x.mutable_data_ptr(), cos.const_data_ptr(), sin.const_data_ptr()));
}

bool glu_forward_by_cuda(const at::Tensor& x, Gate gate, at::Tensor& act) {
  const auto on = rows_of(x, x.size(-1) / 2);
  if (!on || !has_even_rows(x) || !dense({act}, x.scalar_type())) return false;
  const c10::DeviceGuard here(x.device());
  return queued(cuda_glu_forward(*on, gate, x.const_data_ptr(), row_stride(x), act.mutable_data_ptr()));
}

bool glu_backward_by_cuda(const at::Tensor& x, const at::Tensor& dact, Gate gate, at::Tensor& dx) {
  const auto on = rows_of(x, x.size(-1) / 2);
  if (!on || !has_even_rows(x) || !has_even_rows(dx) || !dense({dact}, x.scalar_type()) ||
      dx.scalar_type() != x.scalar_type())
    return false;
  const c10::DeviceGuard here(x.device());
  return queued(cuda_glu_backward(*on, gate, x.const_data_ptr(), row_stride(x), dact.const_data_ptr(),
                                  dx.mutable_data_ptr(), row_stride(dx)));
}

bool cross_entropy_by_cuda(at::Tensor& logits, const at::Tensor& targets, int64_t ignore, const LossFactor& scale,
                           bool gradient, at::Tensor& loss) {
  const auto on = rows_of(logits, logits.size(-1));
  if (!on || !has_even_rows(logits) || !dense({targets}, at::kLong)) return false;
  const c10::DeviceGuard here(logits.device());
  const at::Tensor losses = at::empty({on->rows}, logits.options().dtype(at::kDouble));
  const at::Tensor& factor = scale.on_device();
  const double number = factor.defined() ? 1 : scale.number();
  queued(cuda_cross_entropy(*on, logits.mutable_data_ptr(), row_stride(logits), targets.const_data_ptr<int64_t>(),
                            ignore, number, factor.defined() ? factor.const_data_ptr<double>() : nullptr, gradient,
                            losses.mutable_data_ptr<double>()));
  loss = losses.sum();
  return true;
}

bool dropout_factors_by_cuda(const DropoutMask& mask, const at::Tensor& rows, int64_t cols,
                             const at::TensorOptions& options, at::Tensor& factors) {
  if (!rows.is_cuda() || !dense({rows}, at::kLong)) return false;
  const at::Tensor made = at::empty({rows.numel(), cols}, options);
  const auto on = rows_of(made, cols);
  if (!on) return false;
  const c10::DeviceGuard here(made.device());
  factors = made;
  return queued(cuda_dropout_factors(*on, mask, rows.const_data_ptr<int64_t>(), factors.mutable_data_ptr()));
}

bool sums_of_squares_by_cuda(const at::Tensor& x, at::Tensor& sums) {
  const auto on = rows_of(x.as_strided({x.numel(), 1}, {1, 1}), 1);
  if (!on) return false;
  const c10::DeviceGuard here(x.device());
  sums = at::empty({(x.numel() + kSquareBlock - 1) / kSquareBlock},
                   at::TensorOptions().dtype(at::kDouble).device(x.device()));
  queued(cuda_sums_of_squares(*on, x.const_data_ptr(), sums.mutable_data_ptr<double>()));
  return true;
}

}  // namespace twobp
