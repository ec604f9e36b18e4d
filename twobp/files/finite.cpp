#include "twobp/files/finite.h"

#include <cmath>

namespace twobp {

bool only_finite(const at::Tensor& tensor) {
  if (tensor.numel() == 0 || !at::isFloatingType(tensor.scalar_type())) return true;
  const auto [least, most] = at::aminmax(tensor);  // both are NaN if an element is
  return std::isfinite(least.item<double>()) && std::isfinite(most.item<double>());
}

}  // namespace twobp
