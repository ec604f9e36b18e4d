// The functions of the kernels, computed by LibTorch's operators on whole tensors. They serve tensors that are not in a
// CPU's memory, and CPUs if the environment sets TWOBP_KERNELS=operators. Shapes, meanings and permitted aliases are
// those of kernels.h, encoder_kernels.h and packed_attention.h (scan_operators.h and image_operators.h have the other
// kernels). Sums have the same dtype as in the kernels.
#pragma once

#include <string>

#include <ATen/ATen.h>

#include "twobp/nn/context.h"
#include "twobp/nn/kernels/attention/packed_attention.h"
#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/kernels/rows/row_kernels.h"
#include "twobp/nn/kernels/rows/row_operations.h"

namespace twobp {

// Whether a layer computes this tensor by the operators. Throws Error if the value of TWOBP_KERNELS is unknown.
bool by_operators(const at::Tensor& tensor);

// The kernels that a run on this device (pipeline.device) uses: "avx2", "operators", ... The bits of a run depend on
// them.
std::string kernels_in_use(const std::string& device);

// While this object lives, by_operators() is true for every tensor. For tests, with nothing else running.
class OperatorsEverywhere {
 public:
  OperatorsEverywhere();
  ~OperatorsEverywhere();
  OperatorsEverywhere(const OperatorsEverywhere&) = delete;
  OperatorsEverywhere& operator=(const OperatorsEverywhere&) = delete;
};

namespace operators {

// Converts to the dtype of the computation. Returns the tensor itself if it has that dtype.
inline at::Tensor wide(const at::Tensor& tensor) {
  return tensor.to(compute_type(tensor.scalar_type()));
}

// x, y (rows, cols), gain (cols), rstd (rows).
void rms_norm_forward(const at::Tensor& x, const at::Tensor& gain, double eps, at::Tensor& y, at::Tensor& rstd);
// Returns dL/dgain.
at::Tensor rms_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& gain, const at::Tensor& rstd,
                             at::Tensor& dx);

// x (rows, cols); statistics (2, rows): mean and rstd.
void layer_norm_forward(const at::Tensor& x, const at::Tensor& gain, const at::Tensor& bias, double eps, at::Tensor& y,
                        at::Tensor& statistics);
// Returns dL/dgain and dL/dbias, (2, cols).
at::Tensor layer_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& gain,
                               const at::Tensor& statistics, at::Tensor& dx);

// As rope() of rope.h. `direction` 1: forward, -1: backward.
void rope(at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, const RowHeads& heads, double direction);

// x (rows, 2 * cols), act (rows, cols).
void glu_forward(const at::Tensor& x, Gate gate, at::Tensor& act);
void glu_backward(const at::Tensor& x, const at::Tensor& dact, Gate gate, at::Tensor& dx);

void gelu_forward(const at::Tensor& x, at::Tensor& y, GeluForm form);
// `act` is undefined if it is not wanted.
void gelu_backward(const at::Tensor& x, const at::Tensor& dy, at::Tensor& dx, at::Tensor& act, GeluForm form);

// The mask's factors (n, cols) for the given rows (n): each is 0 or the mask's scale.
at::Tensor dropout_factors(const DropoutMask& mask, const at::Tensor& rows, int64_t cols,
                           const at::TensorOptions& options);

void attention_forward(const at::Tensor& packed, const PackedAttention& attention, at::Tensor& out,
                       at::Tensor& log_sum_exp);
void attention_backward(const at::Tensor& packed, const PackedAttention& attention, const at::Tensor& out,
                        const at::Tensor& log_sum_exp, const at::Tensor& dout, at::Tensor& dpacked);

// Of each block of kSquareBlock numbers of `x`, which is dense and not empty, in the order of its memory: float64 on
// x's device.
at::Tensor sums_of_squares(const at::Tensor& x);

// logits (rows, cols); targets (rows) on the same device. Returns the sum of the losses, a float64 scalar.
at::Tensor cross_entropy(at::Tensor& logits, const at::Tensor& targets, int64_t ignore, const LossFactor& scale,
                         bool gradient);
// x = cap * tanh(x / cap), in place. Returns its derivative.
at::Tensor soft_cap(at::Tensor& x, double cap);

// rows[ids[i]] += from[i]: ids (n), from (n, cols). The bits are the same every time, also on a GPU.
void add_rows_at(at::Tensor& rows, const at::Tensor& ids, const at::Tensor& from);

}  // namespace operators
}  // namespace twobp
