// What flows between layers and across stage boundaries: a short list of tensors.
#pragma once

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>

namespace twobp {

using Values = c10::SmallVector<at::Tensor, 2>;

// True when nobody else holds this tensor or its memory, so that a layer may overwrite it.
inline bool exclusively_owned(const at::Tensor& tensor) {
  return tensor.defined() && tensor.use_count() == 1 && tensor.storage().use_count() == 1;
}

// A tensor of the host on this device, itself if it is there. The caller does not wait for a copy out of
// pinned memory.
inline at::Tensor on_device(const at::Tensor& tensor, at::Device device) {
  return tensor.device() == device ? tensor
                                   : tensor.to(tensor.options().device(device), /*non_blocking=*/true);
}

// The tensor itself if it is contiguous (the caller's handle moves through, so exclusive stays exclusive),
// else a copy.
inline at::Tensor as_contiguous(at::Tensor tensor) {
  if (tensor.is_contiguous()) return tensor;
  return tensor.contiguous();
}

// (..., n) as (rows, n); the same memory where the rows are evenly spaced.
inline at::Tensor as_matrix(const at::Tensor& tensor) {
  return tensor.reshape({-1, tensor.size(-1)});
}

}  // namespace twobp
