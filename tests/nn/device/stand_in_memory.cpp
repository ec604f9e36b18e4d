#include "tests/nn/device/stand_in_memory.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <sys/mman.h>
#include <tuple>
#include <unistd.h>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "tests/nn/device/stand_in_device.h"
#include "tests/nn/device/stand_in_queues.h"

namespace twobp::test {
namespace {

constexpr auto kMemoryType = at::DeviceType::PrivateUse1;
constexpr int kGarbage = 0xff;  // NaN, and -1 in integers
constexpr size_t kMapped = 256 << 10;

c10::Stream current_stream() {
  const c10::impl::VirtualGuardImpl guard(kMemoryType);
  return guard.getStream(guard.getDevice());
}

// Every block is mapped twice. At the address in the tensor, any access ends the program, as when a CPU accesses a
// GPU's memory. Copies and operators use the other address. Observers of memory are told when a block is allocated and
// freed.
//
// A block belongs to the stream that was current when it was allocated. The host may free it while work that uses it is
// still in streams. In its own stream it can be reused at once, because that stream works in order. Then garbage is
// written into it there. Another stream's work is safe only if the block was marked as used there, or if somebody has
// made the block's own stream wait for that work.
class Memory : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const c10::Stream stream = current_stream();
    Stream& owner = stream_of(stream);
    Block block{nullptr, (bytes / page + 1) * page, static_cast<int64_t>(bytes), &owner, recording_of(owner), {}};
    void* data = nullptr;
    {
      const std::lock_guard lock(mutex_);
      reuse_what_has_passed();
      auto& unused = unused_[{&owner, block.recording, block.size}];
      if (unused.empty()) unused.push_back(fresh(block.size));
      std::tie(data, block.alias) = unused.back();
      unused.pop_back();
      blocks_[data] = block;
    }
    tell(data, block.bytes);
    allocated_ += block.bytes;
    return {data, data, &release, stream.device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    enqueue(stream_of(current_stream()),
            [to = address_on_host(to), from = address_on_host(from), bytes] { std::memcpy(to, from, bytes); });
  }

  std::byte* alias(const void* data) {
    const std::lock_guard lock(mutex_);
    const auto found = find(data);
    TORCH_CHECK(found != blocks_.end(), "not a tensor of the stand-in");
    return found->second.alias + (static_cast<const std::byte*>(data) - static_cast<const std::byte*>(found->first));
  }
  int64_t allocated() const { return allocated_; }
  bool has(const void* data) {
    const std::lock_guard lock(mutex_);
    return find(data) != blocks_.end();
  }
  void used_in(const void* data, const c10::Stream& stream) {
    const std::lock_guard lock(mutex_);
    Block& block = find(data)->second;
    Stream& user = stream_of(stream);
    if (&user != block.owner) block.users.insert(&user);
  }

 private:
  struct Block {
    std::byte* alias;
    size_t size;
    int64_t bytes;
    Stream* owner;
    const Recording* recording;  // memory of a graph serves nothing else
    std::set<Stream*> users;     // apart from the owner
  };
  struct Deferred {
    void* data;
    Block block;
    std::vector<std::shared_ptr<Point>> until;
  };
  using Blocks = std::map<const void*, Block>;
  using Mapping = std::pair<void*, std::byte*>;  // the address in the tensor, and the other one

  Blocks::iterator find(const void* data) {
    const auto behind = blocks_.upper_bound(data);
    if (behind == blocks_.begin()) return blocks_.end();
    const auto found = std::prev(behind);
    const auto end = static_cast<const std::byte*>(found->first) + found->second.size;
    return static_cast<const std::byte*>(data) < end ? found : blocks_.end();
  }
  // Blocks of a size share a mapping, because a process may have only some ten thousand mappings.
  Mapping fresh(size_t size) {
    auto& left = fresh_[size];
    if (left.empty()) {
      const size_t count = std::max<size_t>(1, kMapped / size);
      const auto [data, alias] = map(count * size);
      for (size_t i = count; i-- > 0;) left.emplace_back(static_cast<std::byte*>(data) + i * size, alias + i * size);
    }
    const Mapping block = left.back();
    left.pop_back();
    return block;
  }
  static Mapping map(size_t size) {
    const int file = memfd_create("stand_in", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(size)) == 0, "no memory for the stand-in");
    void* alias = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    void* data = mmap(nullptr, size, PROT_NONE, MAP_SHARED, file, 0);
    close(file);
    TORCH_CHECK(alias != MAP_FAILED && data != MAP_FAILED, "no memory for the stand-in");
    std::memset(alias, kGarbage, size);
    return {data, static_cast<std::byte*>(alias)};
  }
  static void tell(void* data, int64_t bytes) {
    c10::reportMemoryUsageToProfiler(data, bytes, 0, 0, c10::impl::VirtualGuardImpl(kMemoryType).getDevice());
  }
  static void release(void* data);
  void forget(void* data) {
    Block block;
    {
      const std::lock_guard lock(mutex_);
      block = blocks_.extract(data).mapped();
    }
    tell(data, -block.bytes);
    const std::lock_guard lock(mutex_);
    if (block.users.empty()) return reuse(data, block);
    if (recording_of(*block.owner)) return;  // nobody may ask for points of a recording
    Deferred deferred{data, block, {}};
    for (Stream* user : block.users) deferred.until.push_back(record_point(*user));
    deferred_.push_back(std::move(deferred));
  }
  void reuse(void* data, const Block& block) {
    // A graph's memory is reused within the graph alone.
    const Recording* now = recording_of(*block.owner);
    if (now == block.recording)
      enqueue(*block.owner, [block] { std::memset(block.alias, kGarbage, static_cast<size_t>(block.bytes)); });
    unused_[{block.owner, block.recording, block.size}].emplace_back(data, block.alias);
  }
  void reuse_what_has_passed() {
    std::erase_if(deferred_, [&](const Deferred& deferred) {
      const auto passed = [](const auto& point) { return !point->is_recorded && point->passed.load(); };
      if (!std::all_of(deferred.until.begin(), deferred.until.end(), passed)) return false;
      reuse(deferred.data, deferred.block);
      return true;
    });
  }

  std::atomic<int64_t> allocated_ = 0;
  std::mutex mutex_;
  Blocks blocks_;
  std::map<std::tuple<Stream*, const Recording*, size_t>, std::vector<Mapping>> unused_;
  std::map<size_t, std::vector<Mapping>> fresh_;  // by size
  std::vector<Deferred> deferred_;
};

// It lives until the program ends, because tensors may outlive main().
Memory& memory() {
  static auto* memory = new Memory;
  return *memory;
}

void Memory::release(void* data) {
  memory().forget(data);
}

// Pinned memory. A copy from it keeps the tensor, so it can be freed at any time.
class Pinned : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = std::malloc(std::max<size_t>(bytes, 1));
    return {data, data, &release, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  static void release(void* data) { std::free(data); }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

Pinned& pinned_memory() {
  static auto* memory = new Pinned;
  return *memory;
}

struct Hooks : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  // That of a CPU, because CPU operators compute here.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static const at::Generator generator = at::detail::createCPUGenerator();
    return generator;
  }
};
[[maybe_unused]] const bool hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

}  // namespace

int64_t allocated() {
  return memory().allocated();
}

c10::Allocator& stand_in_memory() {
  return memory();
}

std::byte* address_on_host(const void* data) {
  return memory().alias(data);
}

bool is_pinned(const at::Tensor& tensor) {
  return tensor.storage().data_ptr().get_deleter() == &Pinned::release;
}

void used_in(const void* data, const c10::Stream& stream) {
  memory().used_in(data, stream);
}

void* reachable(const void* data) {
  return memory().has(data) ? static_cast<void*>(address_on_host(data)) : const_cast<void*>(data);
}

}  // namespace twobp::test
