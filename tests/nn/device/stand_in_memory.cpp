// Tensors of the stand-in device. Only LibTorch's own copies and operators can access their memory, so code
// that treats such a tensor as a CPU tensor is detected.
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <sys/mman.h>
#include <tuple>
#include <unistd.h>

#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include "tests/nn/device/stand_in_device.h"
#include "twobp/nn/device/work_graph.h"

namespace twobp::test {
namespace {

constexpr auto kMemoryType = at::DeviceType::PrivateUse1;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// Every block is mapped twice. At the address in the tensor, any access ends the program, as when a CPU
// accesses a GPU's memory. Copies and operators use the other address. Observers of memory are told when a
// block is allocated and freed. Blocks of the same size take turns in the same mappings, because the kernel
// needs most of the time for new ones.
class Memory : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    Block block{nullptr, (bytes / page + 1) * page, static_cast<int64_t>(bytes)};
    void* data = nullptr;
    {
      const std::lock_guard lock(mutex());
      auto& unused = unused_mappings()[block.size];
      if (unused.empty()) unused.push_back(map(block.size));
      std::tie(data, block.alias) = unused.back();
      unused.pop_back();
      blocks()[data] = block;
    }
    tell(data, block.bytes);
    return {data, data, &release, c10::impl::VirtualGuardImpl(kMemoryType).getDevice()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(alias(to), alias(from), bytes);
  }

  // The address for reading and writing of `data`, which lies within some block.
  static std::byte* alias(const void* data) {
    const std::lock_guard lock(mutex());
    const auto behind = blocks().upper_bound(const_cast<void*>(data));
    TORCH_CHECK(behind != blocks().begin(), "not a tensor of the stand-in");
    const auto& [begin, block] = *std::prev(behind);
    return block.alias + (static_cast<const std::byte*>(data) - static_cast<const std::byte*>(begin));
  }

  // The contents of all blocks. They can be restored in the blocks that still exist.
  using Contents = std::map<void*, std::vector<std::byte>>;
  static Contents contents() {
    const std::lock_guard lock(mutex());
    Contents contents;
    for (const auto& [data, block] : blocks()) contents[data].assign(block.alias, block.alias + block.bytes);
    return contents;
  }
  static void restore(const Contents& contents) {
    const std::lock_guard lock(mutex());
    for (const auto& [data, bytes] : contents) {
      const auto found = blocks().find(data);
      if (found != blocks().end()) std::memcpy(found->second.alias, bytes.data(), bytes.size());
    }
  }

 private:
  struct Block {
    std::byte* alias;
    size_t size;
    int64_t bytes;
  };

  using Mapping = std::pair<void*, std::byte*>;  // the address in the tensor, and the other one
  static Mapping map(size_t size) {
    const int file = memfd_create("stand_in", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(size)) == 0, "no memory for the stand-in");
    void* alias = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    void* data = mmap(nullptr, size, PROT_NONE, MAP_SHARED, file, 0);
    close(file);
    TORCH_CHECK(alias != MAP_FAILED && data != MAP_FAILED, "no memory for the stand-in");
    return {data, static_cast<std::byte*>(alias)};
  }

  // It lives until the program ends, because tensors may outlive this object.
  static std::mutex& mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }
  static std::map<void*, Block>& blocks() {
    static auto* blocks = new std::map<void*, Block>;
    return *blocks;
  }
  static std::map<size_t, std::vector<Mapping>>& unused_mappings() {
    static auto* unused = new std::map<size_t, std::vector<Mapping>>;
    return *unused;
  }
  static void tell(void* data, int64_t bytes) {
    c10::reportMemoryUsageToProfiler(data, bytes, 0, 0, c10::impl::VirtualGuardImpl(kMemoryType).getDevice());
  }
  static void release(void* data) {
    std::unique_lock lock(mutex());
    const Block block = blocks().extract(data).mapped();
    lock.unlock();
    tell(data, -block.bytes);
    lock.lock();
    unused_mappings()[block.size].emplace_back(data, block.alias);
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

// The same memory as a CPU tensor.
at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  if (tensor.numel() == 0) return at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.scalar_type()));
  return at::from_blob(Memory::alias(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                       at::TensorOptions().dtype(tensor.scalar_type()));
}

// A graph of the stand-in. A replay runs the recorded operators again on their inputs and writes the results
// to the same memory. During recording, operators also run, but their effects are undone.
class Recording : public WorkGraph {
 public:
  // Records the operators of all threads.
  static std::unique_ptr<WorkGraph> record(const std::vector<at::Device>&,
                                           const std::function<void()>& work) {
    const Memory::Contents before = Memory::contents();
    auto recording = std::make_unique<Recording>();
    begin_recording();
    current = recording.get();
    try {
      work();
      end_recording();
    } catch (...) {
      current = nullptr;
      throw;
    }
    current = nullptr;
    Memory::restore(before);
    return recording;
  }
  void replay() override {
    ++replays_of_all;
    const Within within;
    for (const auto& operation : operations_) operation();
  }

  static int count() { return replays_of_all; }

  // Runs the operator `compute`, which returns tensors or writes into its arguments.
  template <typename Compute>
  static auto run(const Compute& compute) {
    Recording* const recording = depth == 0 ? current.load() : nullptr;
    const Within within;
    // A lock keeps the recorded order equal to the order of execution.
    const auto lock = recording ? std::unique_lock(recording->mutex_) : std::unique_lock<std::mutex>();
    const auto made = compute();
    if (recording) {
      recording->operations_.push_back([compute, made] { keep_where_it_was(compute(), made); });
    }
    return made;
  }
  static void refuse(const char* what) {
    TORCH_CHECK(depth > 0 || !current.load(), what, " cannot be recorded");
  }

 private:
  // An operator may consist of other operators.
  struct Within {
    Within() { ++depth; }
    ~Within() { --depth; }
  };
  static void keep_where_it_was(const at::Tensor& now, const at::Tensor& then) {
    if (now.defined() && now.is_privateuseone() && !now.is_alias_of(then)) on_host(then).copy_(on_host(now));
  }
  static void keep_where_it_was(const std::vector<at::Tensor>& now, const std::vector<at::Tensor>& then) {
    for (size_t i = 0; i < now.size(); ++i) keep_where_it_was(now[i], then[i]);
  }

  static inline std::atomic<int> replays_of_all = 0;
  static std::atomic<Recording*> current;
  static thread_local int depth;
  std::mutex mutex_;
  std::vector<std::function<void()>> operations_;
};
std::atomic<Recording*> Recording::current{nullptr};
thread_local int Recording::depth = 0;

[[maybe_unused]] const bool records = (record_graphs_by(kMemoryType, &Recording::record), true);

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  if (from.is_cpu() || to.is_cpu()) Recording::refuse("a copy between host and device");
  return Recording::run([from, to] {
    on_host(to).copy_(on_host(from));
    return to;
  });
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}

// LibTorch calls convolutions of a device by other names.
at::Tensor convolution(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                       bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  TORCH_CHECK(!bias || !bias->defined(), "the stand-in's convolutions have no bias");
  return Recording::run(
      [=, s = stride.vec(), p = padding.vec(), d = dilation.vec(), o = output_padding.vec()] {
        return at::convolution_symint(on_host(x), on_host(weight), {}, s, p, d, transposed, o, groups)
            .to(x.device());
      });
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
    c10::SymIntArrayRef output_padding, c10::SymInt groups, std::array<bool, 3> wanted) {
  const std::vector<at::Tensor> made =
      Recording::run([=, s = stride.vec(), p = padding.vec(), d = dilation.vec(), o = output_padding.vec()] {
        const auto [dx, dw, db] = at::convolution_backward_symint(
            on_host(dy), on_host(x), on_host(weight), std::nullopt, s, p, d, transposed, o, groups, wanted);
        const auto back = [&](const at::Tensor& tensor) {
          return tensor.defined() ? tensor.to(dy.device()) : tensor;
        };
        return std::vector<at::Tensor>{back(dx), back(dw), back(db)};
      });
  return {made[0], made[1], made[2]};
}

// Work is done when its operator returns.
void record_stream(at::Tensor&, c10::Stream) {}

std::vector<at::Tensor> tensors_in(const torch::jit::Stack& stack) {
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& value : stack) {
    if (value.isTensor()) tensors.push_back(value.toTensor());
    if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(tensor);
    }
  }
  return tensors;
}

void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const torch::jit::Stack given(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  if (op.operator_name().name == "aten::_local_scalar_dense") Recording::refuse("what the host waits for");
  const auto results = std::make_shared<torch::jit::Stack>();
  Recording::run([results, op, given] {
    *results = given;
    at::native::cpu_fallback(op, results.get());
    return tensors_in(*results);
  });
  torch::jit::drop(*stack, count);
  stack->insert(stack->end(), results->begin(), results->end());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  // Without a kernel for the device, this would be composed of other operators, which round differently.
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

int replays() {
  return Recording::count();
}

}  // namespace twobp::test
