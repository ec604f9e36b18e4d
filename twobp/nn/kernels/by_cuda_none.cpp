// The answers of CUDA kernels in a program without them.
#include "twobp/nn/kernels/rows/rows_by_cuda.h"
#include "twobp/nn/kernels/scan/scan_operators.h"

namespace twobp {

bool rows_by_cuda() {
  return false;
}
bool rms_norm_forward_by_cuda(const at::Tensor&, const at::Tensor&, double, at::Tensor&, at::Tensor&) {
  return false;
}
bool rms_norm_backward_by_cuda(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, at::Tensor&,
                               at::Tensor&) {
  return false;
}
bool layer_norm_forward_by_cuda(const at::Tensor&, const at::Tensor&, const at::Tensor&, double, at::Tensor&,
                                at::Tensor&) {
  return false;
}
bool layer_norm_backward_by_cuda(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                 at::Tensor&, at::Tensor&) {
  return false;
}
bool rope_by_cuda(at::Tensor&, const at::Tensor&, const at::Tensor&, const RowHeads&, double) {
  return false;
}
bool glu_forward_by_cuda(const at::Tensor&, Gate, at::Tensor&) {
  return false;
}
bool glu_backward_by_cuda(const at::Tensor&, const at::Tensor&, Gate, at::Tensor&) {
  return false;
}
bool cross_entropy_by_cuda(at::Tensor&, const at::Tensor&, int64_t, const LossFactor&, bool, at::Tensor&) {
  return false;
}
bool dropout_factors_by_cuda(const DropoutMask&, const at::Tensor&, int64_t, const at::TensorOptions&, at::Tensor&) {
  return false;
}
bool sums_of_squares_by_cuda(const at::Tensor&, at::Tensor&) {
  return false;
}

bool scan_forward_by_cuda(const ScanTensors&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                          const at::Tensor&) {
  return false;
}
bool scan_backward_by_cuda(const ScanTensors&, const at::Tensor&, const at::Tensor&, const ScanGradientTensors&) {
  return false;
}

}  // namespace twobp
