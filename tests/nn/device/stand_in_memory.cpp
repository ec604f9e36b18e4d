// Tensors of the stand-in device: in host memory, which only LibTorch's own copies and operators know, so
// that what takes such a tensor for a CPU's is found out.
#include <cstdlib>

#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

namespace twobp::test {
namespace {

constexpr auto kType = at::DeviceType::PrivateUse1;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// A block knows its size: whoever watches memory is told when it comes and goes.
class Memory : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    auto* block = static_cast<std::byte*>(std::aligned_alloc(kHead, (bytes / kHead + 2) * kHead));
    *reinterpret_cast<int64_t*>(block) = static_cast<int64_t>(bytes);
    std::byte* data = block + kHead;
    tell(data, static_cast<int64_t>(bytes));
    return {data, data, &release, c10::impl::VirtualGuardImpl(kType).getDevice()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  static constexpr size_t kHead = 64;

  static void tell(void* data, int64_t bytes) {
    c10::reportMemoryUsageToProfiler(data, bytes, 0, 0, c10::impl::VirtualGuardImpl(kType).getDevice());
  }
  static void release(void* data) {
    std::byte* block = static_cast<std::byte*>(data) - kHead;
    tell(data, -*reinterpret_cast<int64_t*>(block));
    std::free(block);
  }
};

Memory memory;

at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(sizes, &memory, kKeys, c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(sizes, strides, &memory, kKeys, c10::dtype_or_default(type));
}

// The same memory as a CPU's.
at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                       at::TensorOptions().dtype(tensor.scalar_type()));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}

// Work is done when it returns.
void record_stream(at::Tensor&, c10::Stream) {}

void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  // Without a kernel of the device it would be made of others here, which round otherwise.
  library.impl("silu_backward", torch::CppFunction::makeFromBoxedFunction<&by_cpu>());
  library.impl("resize_", &at::native::resize_);
  library.impl("record_stream", &record_stream);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
}

}  // namespace
}  // namespace twobp::test
