// The scan by its own CUDA kernels (selective_scan_cuda.h): on a GPU's tensors in float32 and float64, in a
// program that was built with a LibTorch for CUDA and nvcc. False: not for these, nothing was done.
#pragma once

#include "twobp/nn/kernels/scan/scan_rows.h"

namespace twobp {

// Whether this program has them.
bool scans_by_cuda();

// As operators::scan_forward and scan_backward (scan_operators.h). Put into the current stream. Throw Error
// where CUDA does not take the work.
bool scan_forward_by_cuda(const ScanTensors& in, const at::Tensor& out, const at::Tensor& borders,
                          const at::Tensor& initial, const at::Tensor& final);
bool scan_backward_by_cuda(const ScanTensors& in, const at::Tensor& dout, const at::Tensor& borders,
                           const ScanGradientTensors& out);

}  // namespace twobp
