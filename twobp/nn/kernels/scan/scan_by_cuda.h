// The scan by its own CUDA kernels (selective_scan_cuda.h). They take a GPU's tensors in float32 and float64, in a
// program that was built with nvcc and a LibTorch for CUDA; operators::scan_forward converts narrower types. The
// functions return false, and do nothing, if the kernels do not apply.
#pragma once

#include "twobp/nn/kernels/scan/scan_rows.h"

namespace twobp {

// As operators::scan_forward and scan_backward (scan_operators.h). They launch the work in the current stream. Throw
// Error if CUDA rejects the work.
bool scan_forward_by_cuda(const ScanTensors& in, const at::Tensor& out, const at::Tensor& borders,
                          const at::Tensor& initial, const at::Tensor& final);
bool scan_backward_by_cuda(const ScanTensors& in, const at::Tensor& dout, const at::Tensor& borders,
                           const ScanGradientTensors& out);

}  // namespace twobp
