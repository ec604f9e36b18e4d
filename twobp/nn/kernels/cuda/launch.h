// Helpers that the callers of our CUDA kernels share.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace twobp {

// The cudaStream_t in which work on this GPU's tensors is queued at present.
inline void* current_stream(const at::Tensor& tensor) {
  return c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device()).native_handle();
}

}  // namespace twobp
