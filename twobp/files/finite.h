// Whether a tensor holds numbers only: neither infinity nor NaN.
#pragma once

#include <ATen/ATen.h>

namespace twobp {

// One pass, without a copy. Integers are always finite.
bool only_finite(const at::Tensor& tensor);

}  // namespace twobp
