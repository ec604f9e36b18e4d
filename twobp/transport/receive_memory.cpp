#include "twobp/transport/receive_memory.h"

#include <algorithm>
#include <deque>
#include <mutex>

#include <ATen/EmptyTensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

namespace twobp {
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
