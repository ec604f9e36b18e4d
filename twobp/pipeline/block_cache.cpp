#include "twobp/pipeline/block_cache.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <new>
#include <vector>

#include <c10/core/CPUAllocator.h>

namespace twobp {
namespace {

constexpr size_t kAlignment = 64;  // LibTorch's, on which the bits of some matrix products depend
constexpr size_t kHead = kAlignment;
constexpr double kMostKept = 2;

size_t rounded(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

thread_local int64_t allocations_here = 0;

}  // namespace

// Ahead of the memory that it describes.
struct BlockCache::Block {
  std::shared_ptr<Store> store;  // null: it is in the store, or of a thread without one
  size_t size = 0;               // behind this
  size_t used = 0;

  void* data() { return reinterpret_cast<std::byte*>(this) + kHead; }
  static Block* of(void* data) {
    return reinterpret_cast<Block*>(reinterpret_cast<std::byte*>(data) - kHead);
  }

  // Null if there is no memory.
  static Block* make(size_t size) {
    static_assert(sizeof(Block) <= kHead);
    void* memory = std::aligned_alloc(kAlignment, kHead + size);
    if (memory == nullptr) return nullptr;
    auto* block = new (memory) Block;
    block->size = size;
    return block;
  }
  static void destroy(Block* block) {
    block->~Block();
    std::free(block);
  }
};

struct BlockCache::Store : std::enable_shared_from_this<BlockCache::Store> {
  ~Store() {
    for (auto& [size, blocks] : free) {
      for (Block* block : blocks) Block::destroy(block);
    }
  }

  Block* take(size_t bytes) {
    const size_t size = rounded(bytes);
    Block* block = nullptr;
    {
      const std::lock_guard lock(mutex);
      std::vector<Block*>& blocks = free[size];
      if (!blocks.empty()) {
        block = blocks.back();
        blocks.pop_back();
        free_bytes -= size;
      } else {
        make_room(size);
      }
      in_use += size;
      most_in_use = std::max(most_in_use, in_use);
    }
    if (block == nullptr) {
      ++allocations_here;
      block = Block::make(size);
    }
    if (block == nullptr) {
      const std::lock_guard lock(mutex);
      in_use -= size;
    } else {
      block->store = shared_from_this();
    }
    return block;
  }

  void give_back(Block* block) {
    const std::shared_ptr<Store> alive = std::move(block->store);
    const std::lock_guard lock(mutex);
    free[block->size].push_back(block);
    free_bytes += block->size;
    in_use -= block->size;
  }

 private:
  // The largest go first: they are the likeliest not to be asked for again.
  void make_room(size_t size) {
    const double most = kMostKept * static_cast<double>(std::max(most_in_use, in_use + size));
    for (auto it = free.rbegin(); it != free.rend(); ++it) {
      while (!it->second.empty() && static_cast<double>(in_use + free_bytes + size) > most) {
        Block::destroy(it->second.back());
        it->second.pop_back();
        free_bytes -= it->first;
      }
    }
  }

  std::mutex mutex;
  std::map<size_t, std::vector<Block*>> free;  // by size
  size_t free_bytes = 0;
  size_t in_use = 0;
  size_t most_in_use = 0;
};

// LibTorch's for all memory of the CPU: on threads without a cache, straight from the system.
struct BlockAllocator : c10::Allocator {
  static thread_local std::shared_ptr<BlockCache::Store> store;

  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes > 0 ? take(bytes) : nullptr;
    return {data, data, &release, c10::Device(c10::kCPU)};
  }

  static void* take(size_t bytes) {
    BlockCache::Block* block = nullptr;
    if (bytes < SIZE_MAX / 2) block = store ? store->take(bytes) : BlockCache::Block::make(rounded(bytes));
    TORCH_CHECK_WITH(OutOfMemoryError, block != nullptr, "not enough memory: ", bytes, " bytes asked for");
    block->used = bytes;
    report(block->data(), static_cast<int64_t>(bytes));
    return block->data();
  }

  // Called by oneDNN, too, which has nothing but the pointer.
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
  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  // To the memory meter, which wants to know what is in use.
  static void report(void* data, int64_t bytes) {
    c10::reportMemoryUsageToProfiler(data, bytes, 0, 0, c10::Device(c10::kCPU));
  }
};

thread_local std::shared_ptr<BlockCache::Store> BlockAllocator::store;

namespace {

// Before any thread is there that could allocate meanwhile.
[[maybe_unused]] const bool installed = [] {
  static BlockAllocator allocator;
  c10::SetCPUAllocator(&allocator, /*priority=*/1);
  return true;
}();

}  // namespace

BlockCache::Use::Use() {
#if !defined(__SANITIZE_ADDRESS__)  // which is to see the end of every tensor's memory
  BlockAllocator::store = std::make_shared<Store>();
#endif
}

BlockCache::Use::~Use() {
  BlockAllocator::store = nullptr;
}

int64_t BlockCache::allocations() {
  return allocations_here;
}

}  // namespace twobp
