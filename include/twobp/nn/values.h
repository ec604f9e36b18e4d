// The values that pass between layers and across stage boundaries: a short list of tensors.
#pragma once

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>

namespace twobp {

using Values = c10::SmallVector<at::Tensor, 2>;

// Whether no other object holds this tensor or its memory. A layer may then overwrite it.
inline bool exclusively_owned(const at::Tensor& tensor) {
  return tensor.defined() && tensor.use_count() == 1 && tensor.storage().use_count() == 1;
}

// A copy of a host tensor in pinned memory, from which the type of device copies without a wait of the host. The memory
// is reused when such copies are done.
at::Tensor pinned(const at::Tensor& tensor, at::DeviceType type);

// A host tensor on this device, or the tensor itself if it is already there. The caller does not wait for the copy,
// which is in its current stream.
at::Tensor on_device(const at::Tensor& tensor, at::Device device);

// The tensor itself if it is contiguous, else a copy. The caller's handle moves through, so an exclusive tensor stays
// exclusive.
inline at::Tensor as_contiguous(at::Tensor tensor) {
  if (tensor.is_contiguous()) return tensor;
  return tensor.contiguous();
}

// Reshapes (..., n) to (rows, n). It shares the memory if the rows are evenly spaced.
inline at::Tensor as_matrix(const at::Tensor& tensor) {
  return tensor.reshape({-1, tensor.size(-1)});
}

}  // namespace twobp
