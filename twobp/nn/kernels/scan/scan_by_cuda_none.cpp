#include "twobp/nn/kernels/scan/scan_by_cuda.h"

namespace twobp {

bool scan_forward_by_cuda(const ScanTensors&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                          const at::Tensor&) {
  return false;
}
bool scan_backward_by_cuda(const ScanTensors&, const at::Tensor&, const at::Tensor&, const ScanGradientTensors&) {
  return false;
}

}  // namespace twobp
