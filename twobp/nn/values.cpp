#include "twobp/nn/values.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>

namespace twobp {

at::Tensor pinned(const at::Tensor& tensor, at::DeviceType type) {
  c10::Allocator* const memory = at::globalContext().getPinnedMemoryAllocator(type);
  constexpr c10::DispatchKeySet kHost(c10::DispatchKey::CPU);
  const at::Tensor copy =
      tensor.is_non_overlapping_and_dense()
          ? at::detail::empty_strided_generic(tensor.sizes(), tensor.strides(), memory, kHost, tensor.scalar_type())
          : at::detail::empty_generic(tensor.sizes(), memory, kHost, tensor.scalar_type(), std::nullopt);
  return copy.copy_(tensor);
}

at::Tensor on_device(const at::Tensor& tensor, at::Device device) {
  if (tensor.device() == device) return tensor;
  const at::Tensor from = tensor.is_cpu() ? pinned(tensor, device.type()) : tensor;
  return from.to(from.options().device(device), /*non_blocking=*/true);
}

}  // namespace twobp
