// The selective scan on tensors, for each version of its kernels: arguments as rows of sequences, LibTorch's operators
// (on whole sequences at once, except for the recurrence itself), and our CUDA kernels.
#pragma once

#include <ATen/ATen.h>

#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/kernels/scan/scan_kernels.h"

namespace twobp {

// Converts tensors to the arguments of scan_kernels.h, one sequence at a time. Rows may be parts of wider rows.

// The inputs of all sequences.
struct ScanTensors {
  at::Tensor x, delta, z;  // (batch, sequence, channels); delta before softplus and without its bias
  at::Tensor bc;           // (batch, sequence, 2 * state): B, C
  at::Tensor a;            // (state, channels), A times log2(e)
  at::Tensor d;            // (channels)
  at::Tensor delta_bias;   // (channels)
};
struct ScanGradientTensors {
  at::Tensor dx, ddelta, dz;  // (batch, sequence, channels)
  at::Tensor dbc;             // (batch, sequence, 2 * state)
  at::Tensor da;              // (batch, state, channels), with respect to A, not to the field a
  at::Tensor dd;              // (batch, channels)
  at::Tensor ddelta_bias;     // (batch, channels)
  // For slices of longer sequences, (batch, state, channels):
  at::Tensor initial{};   // the states before the first position; undefined: zeros
  at::Tensor dfinal{};    // the gradient of the states after the last one; undefined: zeros
  at::Tensor dinitial{};  // receives the gradient of `initial`; undefined: not wanted
};

// Returns the tensor itself if neighbouring channels are neighbours in memory, else a copy.
inline at::Tensor with_dense_rows(at::Tensor tensor) {
  if (tensor.size(-1) == 1 || tensor.stride(-1) == 1) return tensor;
  return tensor.contiguous();
}

// The rows of one sequence; S may be const.
template <typename S>
Rows<S> rows_of(const at::Tensor& tensor, int64_t sequence) {
  if constexpr (std::is_const_v<S>) {
    return {numbers<std::remove_const_t<S>>(tensor) + sequence * tensor.stride(0), tensor.stride(1)};
  } else {
    return {mutable_numbers<S>(tensor) + sequence * tensor.stride(0), tensor.stride(1)};
  }
}

// The sum over the first dimension. Its order does not depend on the number of threads.
inline at::Tensor sum_in_order(const at::Tensor& parts) {
  at::Tensor sum = parts[0].clone();
  for (int64_t i = 1; i < parts.size(0); ++i) sum.add_(parts[i]);
  return sum;
}

namespace operators {

// `borders` (batch, borders, state, channels) and `final` (batch, state, channels) are undefined if they are not
// wanted. An undefined `initial` means zeros.
void scan_forward(const ScanTensors& in, const at::Tensor& out, const at::Tensor& borders, const at::Tensor& initial,
                  const at::Tensor& final);

// dx may be dout. ddelta may be the input's delta, and dz its z.
void scan_backward(const ScanTensors& in, const at::Tensor& dout, const at::Tensor& borders,
                   const ScanGradientTensors& out);

// weight (kernel, channels), bias (channels).
void conv_forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& y);
// dw (batch, kernel, channels), dbias (batch, channels); dx may be x.
void conv_backward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& dy,
                   const at::Tensor& dx, const at::Tensor& dw, const at::Tensor& dbias);

}  // namespace operators

// The scan by its own CUDA kernels (selective_scan_cuda.h). They take a GPU's tensors in float32 and float64, in a
// program that was built with nvcc and a LibTorch for CUDA; operators::scan_forward converts narrower types. The
// functions return false, and do nothing, if the kernels do not apply.

// As operators::scan_forward and scan_backward (scan_operators.h). They launch the work in the current stream. Throw
// Error if CUDA rejects the work.
bool scan_forward_by_cuda(const ScanTensors& in, const at::Tensor& out, const at::Tensor& borders,
                          const at::Tensor& initial, const at::Tensor& final);
bool scan_backward_by_cuda(const ScanTensors& in, const at::Tensor& dout, const at::Tensor& borders,
                           const ScanGradientTensors& out);

}  // namespace twobp
