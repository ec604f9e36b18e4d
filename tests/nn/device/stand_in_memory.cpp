// Tensors of the stand-in device: in memory that only LibTorch's own copies and operators can reach, so that
// what takes such a tensor for a CPU's is found out.
#include <cstring>
#include <map>
#include <mutex>
#include <sys/mman.h>
#include <unistd.h>

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

// Blocks that are mapped twice: where tensors say they lie nothing may be read or written, which would end
// the program as a CPU's access to a GPU's memory does; copies and operators know the other place. Whoever
// watches memory is told when a block comes and goes.
class Memory : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    Block block{nullptr, (bytes / page + 1) * page, static_cast<int64_t>(bytes)};
    const int file = memfd_create("stand_in", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(block.size)) == 0,
                "no memory for the stand-in");
    block.alias =
        static_cast<std::byte*>(mmap(nullptr, block.size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    void* data = mmap(nullptr, block.size, PROT_NONE, MAP_SHARED, file, 0);
    close(file);
    TORCH_CHECK(block.alias != MAP_FAILED && data != MAP_FAILED, "no memory for the stand-in");
    {
      const std::lock_guard lock(mutex());
      blocks()[data] = block;
    }
    tell(data, block.bytes);
    return {data, data, &release, c10::impl::VirtualGuardImpl(kType).getDevice()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(alias(to), alias(from), bytes);
  }

  // Where what lies at `data`, within some block, can be read and written.
  static std::byte* alias(const void* data) {
    const std::lock_guard lock(mutex());
    const auto behind = blocks().upper_bound(const_cast<void*>(data));
    TORCH_CHECK(behind != blocks().begin(), "not a tensor of the stand-in");
    const auto& [begin, block] = *std::prev(behind);
    return block.alias + (static_cast<const std::byte*>(data) - static_cast<const std::byte*>(begin));
  }

 private:
  struct Block {
    std::byte* alias;
    size_t size;
    int64_t bytes;
  };

  // As long as the program lives: tensors may be gone after this object.
  static std::mutex& mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }
  static std::map<void*, Block>& blocks() {
    static auto* blocks = new std::map<void*, Block>;
    return *blocks;
  }
  static void tell(void* data, int64_t bytes) {
    c10::reportMemoryUsageToProfiler(data, bytes, 0, 0, c10::impl::VirtualGuardImpl(kType).getDevice());
  }
  static void release(void* data) {
    Block block{};
    {
      const std::lock_guard lock(mutex());
      block = blocks().extract(data).mapped();
    }
    tell(data, -block.bytes);
    munmap(block.alias, block.size);
    munmap(data, block.size);
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
  if (tensor.numel() == 0) return at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.scalar_type()));
  return at::from_blob(Memory::alias(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
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

// Which LibTorch asks a device for by other names.
at::Tensor convolution(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                       bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  TORCH_CHECK(!bias || !bias->defined(), "the stand-in's convolutions have no bias");
  return at::convolution_symint(on_host(x), on_host(weight), {}, stride, padding, dilation, transposed,
                                output_padding, groups)
      .to(x.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
    c10::SymIntArrayRef output_padding, c10::SymInt groups, std::array<bool, 3> wanted) {
  const auto [dx, dw, db] =
      at::convolution_backward_symint(on_host(dy), on_host(x), on_host(weight), std::nullopt, stride, padding,
                                      dilation, transposed, output_padding, groups, wanted);
  const auto back = [&](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.to(dy.device()) : tensor;
  };
  return {back(dx), back(dw), back(db)};
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
  library.impl("convolution_overrideable", &convolution);
  library.impl("convolution_backward_overrideable", &convolution_backward);
  library.impl("resize_", &at::native::resize_);
  library.impl("record_stream", &record_stream);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
}

}  // namespace
}  // namespace twobp::test
