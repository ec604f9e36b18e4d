#include "twobp/pipeline/memory/block_cache.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <sys/mman.h>
#include <unordered_set>
#include <utility>

#include <c10/core/CPUAllocator.h>

#include "twobp/pipeline/memory/memory_meter.h"

#if defined(__SANITIZE_ADDRESS__)
#define TWOBP_BLOCK_CACHE 0
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TWOBP_BLOCK_CACHE 0
#endif
#endif
#if !defined(TWOBP_BLOCK_CACHE)
#define TWOBP_BLOCK_CACHE 1
#endif

namespace twobp {
namespace {

constexpr size_t kAlignment = 64;  // LibTorch's own; the bits of some matrix products depend on it
constexpr size_t kHead = kAlignment;
constexpr int64_t kKeptSteps = 16;
// Blocks of this many bytes and more have pages of their own, which go back to the system with them. The C library
// would keep most of them.
constexpr size_t kMapped = size_t{1} << 20U;

// Large blocks have few sizes, so that a tensor of another length finds one to take. What it does not touch is no
// memory yet.
size_t rounded(size_t bytes) {
  const size_t unit = bytes < kMapped ? kAlignment : std::bit_floor(bytes) / 4;
  return (bytes + unit - 1) / unit * unit;
}

// The addresses of all blocks of the process. oneDNN frees by address alone, even memory from before install().
class Addresses {
 public:
  // Never destroyed, because the last tensors outlive everything else.
  static Addresses& all() {
    static auto* const addresses = new Addresses;
    return *addresses;
  }
  void add(const void* data) {
    const std::lock_guard lock(mutex_);
    addresses_.insert(data);
  }
  void remove(const void* data) {
    const std::lock_guard lock(mutex_);
    addresses_.erase(data);
  }
  bool has(const void* data) {
    const std::lock_guard lock(mutex_);
    return addresses_.contains(data);
  }

 private:
  std::mutex mutex_;
  std::unordered_set<const void*> addresses_;
};

// LibTorch's own allocator, from before install().
c10::Allocator* previous = nullptr;

}  // namespace

// The header in front of a block's memory.
struct BlockCache::Block {
  std::shared_ptr<Store> store;  // null: the block is in the store, or its thread has no store
  Block* next = nullptr;         // in the store
  size_t size = 0;               // bytes after the header
  size_t used = 0;
  int64_t step = 0;  // when it was given back

  void* data() { return reinterpret_cast<std::byte*>(this) + kHead; }
  static Block* of(void* data) { return reinterpret_cast<Block*>(reinterpret_cast<std::byte*>(data) - kHead); }

  // Returns null if there is no memory.
  static Block* make(size_t size) {
    static_assert(sizeof(Block) <= kHead);
    void* memory = size < kMapped
                       ? std::aligned_alloc(kAlignment, kHead + size)
                       : mmap(nullptr, kHead + size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == nullptr || memory == MAP_FAILED) return nullptr;
    auto* block = new (memory) Block;
    block->size = size;
    Addresses::all().add(block->data());
    return block;
  }
  static void destroy(Block* block) {
    Addresses::all().remove(block->data());
    const size_t size = block->size;
    block->~Block();
    if (size < kMapped) return std::free(block);
    munmap(block, kHead + size);
  }
};

struct BlockCache::Store : std::enable_shared_from_this<BlockCache::Store> {
  Block* take(size_t size) {
    Block* block = nullptr;
    {
      const std::lock_guard lock(mutex);
      const auto found = kept.find(size);
      if (found != kept.end() && found->second != nullptr) {
        block = std::exchange(found->second, found->second->next);
        kept_bytes -= size;
      } else {
        ++allocations;
        make_room(size);
      }
    }
    if (block == nullptr) {
      block = Block::make(size);
      if (block == nullptr) {
        const std::lock_guard lock(mutex);
        drop(step + 1);
        block = Block::make(size);
      }
      if (block == nullptr) return nullptr;
    }
    block->store = shared_from_this();
    const std::lock_guard lock(mutex);
    in_use += size;
    most_in_use = std::max(most_in_use, in_use);
    return block;
  }

  void give_back(Block* block) {
    const std::shared_ptr<Store> alive = std::move(block->store);
    const std::lock_guard lock(mutex);
    in_use -= block->size;
    if (closed) return Block::destroy(block);
    block->step = step;
    block->next = std::exchange(kept[block->size], block);
    kept_bytes += block->size;
  }

  void begin_step() {
    const std::lock_guard lock(mutex);
    stays = in_use;
    const bool first = ++step == 1;  // what came and went before was for setting up
    most_in_use = first ? stays : std::max(most_in_use, stays);
    drop(first ? step : step - kKeptSteps);
  }

  void close() {
    const std::lock_guard lock(mutex);
    closed = true;
    drop(step + 1);
  }

  int64_t allocations = 0;

 private:
  // Destroys the blocks that were given back before that step.
  void drop(int64_t before) {
    for (auto it = kept.begin(); it != kept.end();) {
      // Blocks given back last come first, so all blocks behind an old one are older.
      Block** link = &it->second;
      while (*link != nullptr && (*link)->step >= before) link = &(*link)->next;
      while (*link != nullptr) {
        Block* block = std::exchange(*link, (*link)->next);
        kept_bytes -= block->size;
        Block::destroy(block);
      }
      it = it->second == nullptr ? kept.erase(it) : std::next(it);
    }
  }

  // Destroys the oldest blocks until the rest fits: what the steps so far have used, and twice what came and went.
  void make_room(size_t size) {
    const size_t most = std::max(most_in_use, in_use + size);
    const size_t allowed = most + 2 * (most - std::min(stays, most));
    for (int64_t before = step - kKeptSteps; in_use + kept_bytes + size > allowed && before <= step; ++before)
      drop(before + 1);
  }

  std::mutex mutex;
  std::map<size_t, Block*> kept;  // by size; blocks given back last come first
  size_t kept_bytes = 0;
  size_t in_use = 0;
  size_t most_in_use = 0;
  size_t stays = 0;  // bytes that were in use when the step began
  int64_t step = 0;
  bool closed = false;
};

// Replaces LibTorch's CPU allocator.
struct BlockAllocator : c10::Allocator {
  static thread_local std::shared_ptr<BlockCache::Store> store;

  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes > 0 ? take(bytes) : nullptr;
    return {data, data, &release, c10::Device(c10::kCPU)};
  }

  static void* take(size_t bytes) {
    BlockCache::Block* block = nullptr;
    if (bytes < SIZE_MAX / 2) block = store ? store->take(rounded(bytes)) : BlockCache::Block::make(rounded(bytes));
    TORCH_CHECK_WITH(OutOfMemoryError, block != nullptr, "cannot allocate ", bytes, " bytes of memory");
    block->used = bytes;
    report(block->data(), static_cast<int64_t>(bytes));
    return block->data();
  }

  static void release(void* data) {
    if (data == nullptr) return;
    BlockCache::Block* block = BlockCache::Block::of(data);
    report(data, -static_cast<int64_t>(block->used));
    if (block->store) {
      block->store->give_back(block);
    } else {
      BlockCache::Block::destroy(block);
    }
  }
  // For callers that have only the address.
  static void release_by_address(void* data) {
    if (data == nullptr || Addresses::all().has(data)) return release(data);
    previous->raw_deallocate(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_by_address; }

  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  // Reports to the memory meter, which counts the bytes in use.
  static void report(void* data, int64_t bytes) {
    c10::reportMemoryUsageToProfiler(data, bytes, 0, 0, c10::Device(c10::kCPU));
    MemoryMeter::report_beside_profiler(data, bytes);
  }
};

thread_local std::shared_ptr<BlockCache::Store> BlockAllocator::store;

void BlockCache::install() {
  static const bool installed = [] {
    previous = c10::GetCPUAllocator();
    // It must live until the last tensor is gone.
    if (TWOBP_BLOCK_CACHE) c10::SetCPUAllocator(new BlockAllocator, /*priority=*/1);
    return true;
  }();
  static_cast<void>(installed);
}

BlockCache::Use::Use() : outermost_(TWOBP_BLOCK_CACHE && !BlockAllocator::store) {
  if (outermost_) BlockAllocator::store = std::make_shared<Store>();
}

BlockCache::Use::~Use() {
  if (outermost_) std::exchange(BlockAllocator::store, nullptr)->close();
}

void BlockCache::begin_step() {
  if (BlockAllocator::store) BlockAllocator::store->begin_step();
}

std::shared_ptr<BlockCache::Store> BlockCache::here() {
  return BlockAllocator::store;
}

void BlockCache::share(std::shared_ptr<Store> store) {
  BlockAllocator::store = std::move(store);
}

int64_t BlockCache::allocations() {
  return BlockAllocator::store ? BlockAllocator::store->allocations : 0;
}

}  // namespace twobp
