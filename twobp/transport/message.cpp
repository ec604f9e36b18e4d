#include "twobp/transport/message.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <mutex>
#include <numeric>

#include <ATen/EmptyTensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include "twobp/core/check.h"

namespace twobp {
namespace {

constexpr uint32_t kMagic = 0x70623274;  // "t2bp"
constexpr uint32_t kFormat = 1;
constexpr int kMostDimensions = 64;
constexpr int64_t kMostTensorBytes = int64_t{1} << 40;

enum class Kind : uint8_t { kMessage, kAbort };
enum class Place : uint8_t { kUndefined, kInline, kApart };

// The beginning of every head. Numbers are in the machine's byte order, because all ranks run on the same kind of
// machine.
struct Prefix {
  uint32_t magic = kMagic;
  uint32_t format = kFormat;
  Kind kind = Kind::kMessage;
  MessageKind tag_kind = MessageKind::kForward;
  uint8_t group = 0;
  uint8_t unused = 0;
  int32_t stage = 0;
  int32_t micro_batch = 0;
  uint32_t count = 0;  // tensors, or bytes of the reason
  int64_t step = 0;
  int64_t number = 0;
};
static_assert(sizeof(Prefix) == 40);

// Precedes a tensor's sizes and strides.
struct TensorPrefix {
  int8_t type = 0;
  Place place = Place::kUndefined;
  uint8_t dimensions = 0;
  uint8_t unused[5] = {};
};
static_assert(sizeof(TensorPrefix) == 8);

template <typename T>
void put(std::vector<std::byte>& head, const T* values, size_t count) {
  if (count == 0) return;
  const size_t begin = head.size();
  head.resize(begin + count * sizeof(T));
  std::memcpy(head.data() + begin, values, count * sizeof(T));
}

class Reader {
 public:
  Reader(std::span<const std::byte> head, int from) : head_(head), from_(from) {}

  template <typename T>
  void take(T* values, size_t count) {
    require(count * sizeof(T) <= head_.size(), "it ends too early");
    if (count > 0) std::memcpy(values, head_.data(), count * sizeof(T));
    head_ = head_.subspan(count * sizeof(T));
  }
  size_t left() const { return head_.size(); }
  template <typename... What>
  void require(bool holds, const What&... what) const {
    TWOBP_CHECK(holds, "a message from rank ", from_, " makes no sense: ", what...,
                "; do all ranks run the same version of the program?");
  }

 private:
  std::span<const std::byte> head_;
  int from_;
};

bool is_dense(at::IntArrayRef sizes, at::IntArrayRef strides) {
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return strides[a] != strides[b] ? strides[a] < strides[b] : sizes[a] < sizes[b];
  });
  int64_t expected = 1;
  for (const size_t d : order) {
    if (sizes[d] == 1) continue;
    if (strides[d] != expected) return false;
    expected *= sizes[d];
  }
  return true;
}

// Makes a tensor that covers its memory without gaps. The order of its strides is kept, because it decides which
// kernels run, and so the bits of the result.
at::Tensor without_gaps(const at::Tensor& tensor) {
  TWOBP_CHECK(tensor.layout() == at::kStrided && !tensor.is_quantized(), "a message carries plain tensors, not ",
              tensor.toString());
  at::Tensor plain = tensor.is_conj() || tensor.is_neg() ? tensor.resolve_conj().resolve_neg() : tensor;
  if (plain.numel() == 0) return plain.contiguous();
  return is_dense(plain.sizes(), plain.strides()) ? plain : plain.clone();
}

bool is_known(int8_t type) {
  if (type < 0 || type >= static_cast<int8_t>(at::ScalarType::NumOptions)) return false;
  const auto scalar = static_cast<at::ScalarType>(type);
  return at::isIntegralType(scalar, true) || at::isFloatingType(scalar) || at::isComplexType(scalar);
}

at::Tensor read_tensor(Reader& reader, const TensorPrefix& prefix, ReceiveMemory* memory) {
  reader.require(is_known(prefix.type), "it has a tensor of unknown type ", static_cast<int>(prefix.type));
  reader.require(prefix.dimensions <= kMostDimensions, "it has a tensor of ", static_cast<int>(prefix.dimensions),
                 " dimensions");
  std::vector<int64_t> sizes(prefix.dimensions);
  std::vector<int64_t> strides(prefix.dimensions);
  reader.take(sizes.data(), sizes.size());
  reader.take(strides.data(), strides.size());
  const auto type = static_cast<at::ScalarType>(prefix.type);
  int64_t bytes = static_cast<int64_t>(c10::elementSize(type));
  bool empty = false;
  for (size_t d = 0; d < sizes.size(); ++d) {
    reader.require(sizes[d] >= 0 && strides[d] >= 0, "it has a tensor of size ", sizes[d], ", stride ", strides[d]);
    empty |= sizes[d] == 0;
  }
  // All dimensions are checked even if one is 0, because their product is a stride.
  for (const int64_t size : sizes) {
    const bool overflow = __builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes);
    reader.require(!overflow && bytes <= kMostTensorBytes, "it has a tensor that is too large");
  }
  if (empty) bytes = 0;
  reader.require(empty || is_dense(sizes, strides), "it has a tensor with gaps or overlaps");
  reader.require(!empty || prefix.place == Place::kInline, "it has an empty tensor that travels apart");
  if (prefix.place == Place::kInline) {
    reader.require(static_cast<uint64_t>(bytes) <= reader.left(),
                   "it ends too early");  // before it is allocated
    at::Tensor tensor = empty ? at::empty(sizes, type) : at::empty_strided(sizes, strides, type);
    reader.take(static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes());
    return tensor;
  }
  try {
    if (memory != nullptr) return memory->allocate(sizes, strides, type);
    return at::empty_strided(sizes, strides, type);
  } catch (const c10::Error&) {
    reader.require(false, "it has a tensor of ", bytes, " bytes, but there is not enough memory for it");
    throw;
  }
}

}  // namespace

Values dense(Values values) {
  for (at::Tensor& value : values) {
    if (value.defined()) value = without_gaps(value);
  }
  return values;
}

std::optional<Forms> forms_of(const Values& values) {
  Forms forms;
  for (const at::Tensor& value : values) {
    if (!value.defined() || value.numel() == 0) return std::nullopt;
    forms.push_back({value.scalar_type(), value.sizes().vec(), value.strides().vec()});
  }
  if (forms.empty()) return std::nullopt;
  return forms;
}

std::optional<int> number_of_expected(const Tag& tag, int64_t numbers) {
  constexpr int64_t kStages = 256;
  if (tag.stage < 0 || tag.stage >= kStages || tag.micro_batch < 0) return std::nullopt;
  const int64_t number = 2 * (tag.micro_batch * kStages + tag.stage) + (tag.kind == MessageKind::kBackward ? 1 : 0);
  if (number >= numbers) return std::nullopt;
  return static_cast<int>(number);
}

OutgoingMessage pack_message(const Tag& tag, int64_t number, const Values& values) {
  OutgoingMessage message;
  Prefix prefix;
  prefix.tag_kind = tag.kind;
  prefix.group = tag.group;
  prefix.stage = tag.stage;
  prefix.micro_batch = tag.micro_batch;
  prefix.step = tag.step;
  prefix.number = number;
  prefix.count = static_cast<uint32_t>(values.size());
  message.head.reserve(512);
  put(message.head, &prefix, 1);
  int64_t inlined = 0;
  for (const at::Tensor& value : values) {
    TensorPrefix about;
    if (!value.defined()) {
      put(message.head, &about, 1);
      continue;
    }
    TWOBP_CHECK(value.is_cpu(), "this transport carries tensors of a CPU's memory, not ", value.toString());
    at::Tensor tensor = without_gaps(value);
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    const bool small = inlined + bytes <= kMostInlineBytes;
    about.type = static_cast<int8_t>(tensor.scalar_type());
    about.place = small ? Place::kInline : Place::kApart;
    TWOBP_CHECK(tensor.dim() <= kMostDimensions, "a message carries a tensor of ", tensor.dim(),
                " dimensions, at most ", kMostDimensions, " are possible");
    about.dimensions = static_cast<uint8_t>(tensor.dim());
    put(message.head, &about, 1);
    put(message.head, tensor.sizes().data(), tensor.dim());
    put(message.head, tensor.strides().data(), tensor.dim());
    if (small) {
      inlined += bytes;
      put(message.head, static_cast<const std::byte*>(tensor.const_data_ptr()), bytes);
    } else {
      message.apart.push_back(std::move(tensor));
    }
  }
  TWOBP_CHECK(static_cast<int64_t>(message.head.size()) <= kMostHeadBytes, "a message carries ", values.size(),
              " tensors, too many for one");
  return message;
}

std::vector<std::byte> pack_abort(const std::string& reason) {
  std::vector<std::byte> head;
  Prefix prefix;
  prefix.kind = Kind::kAbort;
  prefix.count = static_cast<uint32_t>(std::min<size_t>(reason.size(), kMostHeadBytes - sizeof(prefix)));
  put(head, &prefix, 1);
  put(head, reason.data(), prefix.count);
  return head;
}

IncomingMessage unpack_message(std::span<const std::byte> head, int from, ReceiveMemory* memory) {
  Reader reader(head, from);
  Prefix prefix;
  reader.take(&prefix, 1);
  reader.require(prefix.magic == kMagic && prefix.format == kFormat, "it begins with unknown bytes");
  IncomingMessage message;
  if (prefix.kind == Kind::kAbort) {
    reader.require(prefix.count == reader.left(), "its reason has another length");
    message.is_abort = true;
    message.reason.resize(prefix.count);
    reader.take(message.reason.data(), prefix.count);
    return message;
  }
  reader.require(prefix.kind == Kind::kMessage, "it is of unknown kind");
  reader.require(prefix.tag_kind <= MessageKind::kNone, "its tag is of unknown kind");
  // Each tensor takes at least its prefix.
  reader.require(prefix.count <= reader.left() / sizeof(TensorPrefix), "it announces ", prefix.count, " tensors");
  message.tag = {prefix.step, prefix.stage, prefix.micro_batch, prefix.tag_kind, prefix.group};
  message.number = prefix.number;
  for (uint32_t i = 0; i < prefix.count; ++i) {
    TensorPrefix about;
    reader.take(&about, 1);
    reader.require(about.place <= Place::kApart, "it has a tensor at an unknown place");
    if (about.place == Place::kUndefined) {
      message.values.emplace_back();
      continue;
    }
    message.values.push_back(read_tensor(reader, about, memory));
    if (about.place == Place::kApart) message.apart.push_back(message.values.back());
  }
  reader.require(reader.left() == 0, "it is longer than it says");
  return message;
}

namespace {

void report(void* memory, int64_t bytes) {
  if (!c10::memoryProfilingEnabled()) return;
  c10::reportMemoryUsageToProfiler(memory, bytes, 0, 0, c10::Device(c10::kCPU));
}

}  // namespace

// Released memory, oldest first.
struct ReceiveMemory::Kept {
  mutable std::mutex mutex;
  std::deque<std::pair<int64_t, c10::DataPtr>> blocks;
  int64_t bytes = 0;
  int64_t most = 0;

  // Returns null if there is no block of this size.
  c10::DataPtr take(int64_t size) {
    const std::lock_guard lock(mutex);
    const auto found =
        std::find_if(blocks.rbegin(), blocks.rend(), [&](const auto& block) { return block.first == size; });
    if (found == blocks.rend()) return {};
    c10::DataPtr memory = std::move(found->second);
    blocks.erase(std::next(found).base());
    bytes -= size;
    return memory;
  }

  void put(int64_t size, c10::DataPtr memory) {
    if (size > most) return;
    const std::lock_guard lock(mutex);
    blocks.emplace_back(size, std::move(memory));
    bytes += size;
    while (bytes > most) {
      bytes -= blocks.front().first;
      blocks.pop_front();
    }
  }
};

// Memory in use by a tensor.
struct ReceiveMemory::Block {
  std::shared_ptr<Kept> kept;
  int64_t bytes;
  c10::DataPtr memory;

  static void release(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    // Reported as freed even if it stays allocated.
    report(block->memory.get(), -block->bytes);
    block->kept->put(block->bytes, std::move(block->memory));
  }
};

ReceiveMemory::ReceiveMemory(int64_t most_kept) : kept_(std::make_shared<Kept>()) {
  kept_->most = most_kept;
}

int64_t ReceiveMemory::kept_bytes() const {
  const std::lock_guard lock(kept_->mutex);
  return kept_->bytes;
}

at::Tensor ReceiveMemory::allocate(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type) {
  at::Tensor tensor = at::empty({0}, type);
  const auto bytes = static_cast<int64_t>(at::detail::computeStorageNbytes(sizes, strides, c10::elementSize(type)));
  auto block = std::make_unique<Block>(Block{kept_, bytes, kept_->take(bytes)});
  if (block->memory.get() == nullptr) {
    block->memory = c10::GetCPUAllocator()->allocate(bytes);
  } else {
    report(block->memory.get(), bytes);
  }
  void* memory = block->memory.get();
  c10::DataPtr data(memory, block.release(), &Block::release, c10::Device(c10::kCPU));
  c10::Storage storage(c10::Storage::use_byte_size_t{}, bytes, std::move(data), nullptr, false);
  return tensor.set_(std::move(storage), 0, sizes, strides);
}

}  // namespace twobp
