// What the kernels compute, by LibTorch's operators on whole tensors: for tensors that are not in a CPU's
// memory, and on a CPU where the environment says TWOBP_KERNELS=operators. Shapes, meanings and what may be
// one tensor are those of kernels.h, encoder_kernels.h and packed_attention.h (scan_operators.h and
// image_operators.h have the others'); sums are taken in the dtype
// that the kernels take them in.
#pragma once

#include <string>

#include <ATen/ATen.h>

#include "twobp/nn/kernels/attention/packed_attention.h"
#include "twobp/nn/kernels/encoder/encoder_kernels.h"
#include "twobp/nn/kernels/products/rows.h"

namespace twobp {

// Whether a layer's work on this tensor is for the operators. Throws Error for a TWOBP_KERNELS that is
// unknown.
bool by_operators(const at::Tensor& tensor);

// What a run on this device (pipeline.device) computes with, which its bits depend on: "avx2", "operators",
// ...
std::string kernels_in_use(const std::string& device);

// While it lives, by_operators() of every tensor. For tests, with nothing else running.
class OperatorsEverywhere {
 public:
  OperatorsEverywhere();
  ~OperatorsEverywhere();
  OperatorsEverywhere(const OperatorsEverywhere&) = delete;
  OperatorsEverywhere& operator=(const OperatorsEverywhere&) = delete;
};

namespace operators {

// In the dtype that is computed with: itself if it is of that.
inline at::Tensor wide(const at::Tensor& tensor) {
  return tensor.to(compute_type(tensor.scalar_type()));
}

// x, y (rows, cols), gain (cols), rstd (rows).
void rms_norm_forward(const at::Tensor& x, const at::Tensor& gain, double eps, at::Tensor& y,
                      at::Tensor& rstd);
// Gives dL/dgain.
at::Tensor rms_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& gain,
                             const at::Tensor& rstd, at::Tensor& dx);

// x (rows, cols); statistics (2, rows): mean and rstd.
void layer_norm_forward(const at::Tensor& x, const at::Tensor& gain, const at::Tensor& bias, double eps,
                        at::Tensor& y, at::Tensor& statistics);
// Gives dL/dgain and dL/dbias, (2, cols).
at::Tensor layer_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& gain,
                               const at::Tensor& statistics, at::Tensor& dx);

// The first `heads` heads of each row of x (batch, positions, stride) in place; cos, sin (positions, half).
// `direction` 1: forward, -1: backward.
void rope(at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, int64_t heads, double direction);

// x (rows, 2 * cols), act (rows, cols).
void swiglu_forward(const at::Tensor& x, at::Tensor& act);
void swiglu_backward(const at::Tensor& x, const at::Tensor& dact, at::Tensor& dx);

void gelu_forward(const at::Tensor& x, at::Tensor& y, GeluForm form);
// `act` undefined: not wanted.
void gelu_backward(const at::Tensor& x, const at::Tensor& dy, at::Tensor& dx, at::Tensor& act, GeluForm form);

// The mask's factors, 0 or its scale, of these rows (n): (n, cols).
at::Tensor dropout_factors(const DropoutMask& mask, const at::Tensor& rows, int64_t cols,
                           const at::TensorOptions& options);

void attention_forward(const at::Tensor& packed, const PackedAttention& attention, at::Tensor& out,
                       at::Tensor& log_sum_exp);
void attention_backward(const at::Tensor& packed, const PackedAttention& attention, const at::Tensor& out,
                        const at::Tensor& log_sum_exp, const at::Tensor& dout, at::Tensor& dpacked);

// In float64.
double sum_of_squares(const at::Tensor& x);

// logits (rows, cols), targets (rows) where the logits are. Gives the losses' sum, float64, of no dimension.
at::Tensor cross_entropy(at::Tensor& logits, const at::Tensor& targets, int64_t ignore, double scale,
                         bool gradient);

// rows[ids[i]] += from[i]: ids (n), from (n, cols). The same bits every time, on a GPU too.
void add_rows_at(at::Tensor& rows, const at::Tensor& ids, const at::Tensor& from);

}  // namespace operators
}  // namespace twobp
