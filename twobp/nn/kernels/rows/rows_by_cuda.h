// Operators on rows by CUDA kernels of our own (row_kernels.h), for a GPU's tensors, in a program that was built with
// nvcc and a LibTorch for CUDA. Each does the same as the function of operators.h that calls it, by one or two passes
// over memory. The functions return false, and do nothing, if the kernels do not apply. They queue work in the current
// stream. Throw Error if CUDA rejects it.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "twobp/nn/context.h"
#include "twobp/nn/kernels/rows/row_arguments.h"
#include "twobp/nn/kernels/rows/row_operations.h"

namespace twobp {

// Whether this program contains the kernels.
bool rows_by_cuda();

bool rms_norm_forward_by_cuda(const at::Tensor& x, const at::Tensor& gain, double eps, at::Tensor& y, at::Tensor& rstd);
bool rms_norm_backward_by_cuda(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& gain,
                               const at::Tensor& rstd, at::Tensor& dx, at::Tensor& dgain);
bool layer_norm_forward_by_cuda(const at::Tensor& x, const at::Tensor& gain, const at::Tensor& bias, double eps,
                                at::Tensor& y, at::Tensor& statistics);
bool layer_norm_backward_by_cuda(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& gain,
                                 const at::Tensor& statistics, at::Tensor& dx, at::Tensor& sums);
bool rope_by_cuda(at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, const RowHeads& heads, double direction);
bool glu_forward_by_cuda(const at::Tensor& x, Gate gate, at::Tensor& act);
bool glu_backward_by_cuda(const at::Tensor& x, const at::Tensor& dact, Gate gate, at::Tensor& dx);
bool cross_entropy_by_cuda(at::Tensor& logits, const at::Tensor& targets, int64_t ignore, const LossFactor& scale,
                           bool gradient, at::Tensor& loss);
bool dropout_factors_by_cuda(const DropoutMask& mask, const at::Tensor& rows, int64_t cols,
                             const at::TensorOptions& options, at::Tensor& factors);
bool sums_of_squares_by_cuda(const at::Tensor& x, at::Tensor& sums);

// Helpers that the callers of our CUDA kernels share.

// The cudaStream_t in which work on this GPU's tensors is queued at present.
inline void* current_stream(const at::Tensor& tensor) {
  return c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device()).native_handle();
}

}  // namespace twobp
