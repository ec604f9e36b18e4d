// POSIX mmap, mprotect. Replaces operator new and delete of the whole process.
#include "tests/graph/operator_sweep/guarded_memory.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <sys/mman.h>

#include <c10/core/Allocator.h>

namespace twobp::test {

Guard guard;

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kGap = size_t{1} << 20U;  // on both sides of a block, at least
constexpr size_t kArena = size_t{1} << 42U;
constexpr size_t kWordAlignment = 16;  // of what is not a tensor

unsigned char* reserve(size_t bytes, int protection) {
  void* at = ::mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) std::abort();
  return static_cast<unsigned char*>(at);
}

struct Arena {
  unsigned char* begin = reserve(kArena, PROT_NONE);
  // The pages of the block that begins on a page.
  uint32_t* pages = reinterpret_cast<uint32_t*>(reserve(kArena / kPage * sizeof(uint32_t), PROT_READ | PROT_WRITE));
  size_t next = kGap;
  size_t live = 0;  // blocks

  bool has(const void* at) const { return at >= begin && at < begin + kArena; }

  void* allocate(size_t bytes, size_t alignment) {
    if (bytes > guard.most) return nullptr;
    const size_t count = (bytes + kPage - 1) / kPage;
    if (next + count * kPage + kGap > kArena) std::abort();
    unsigned char* first = begin + next;
    if (::mprotect(first, count * kPage, PROT_READ | PROT_WRITE) != 0) return nullptr;
    pages[next / kPage] = static_cast<uint32_t>(count);
    next += count * kPage + kGap;
    ++live;
    std::memset(first, guard.fill, count * kPage);
    if (!guard.at_end) return first;
    const auto end = reinterpret_cast<uintptr_t>(first + count * kPage);
    return reinterpret_cast<void*>((end - bytes) / alignment * alignment);
  }

  // Later uses of the block end the process too, while any block lives.
  void free(void* at) {
    size_t page = static_cast<size_t>(static_cast<unsigned char*>(at) - begin) / kPage;
    const size_t bytes = size_t{pages[page]} * kPage;
    if (bytes == 0) std::abort();  // freed twice
    pages[page] = 0;
    ::madvise(begin + page * kPage, bytes, MADV_DONTNEED);
    ::mprotect(begin + page * kPage, bytes, PROT_NONE);
    if (--live == 0) next = kGap;
  }
};

// Made at its first use, and never destroyed.
Arena& arena() {
  alignas(Arena) static unsigned char place[sizeof(Arena)];
  static Arena* const made = new (place) Arena;
  return *made;
}

void* allocate(size_t bytes, size_t alignment) {
  if (guard.on) return arena().allocate(bytes == 0 ? 1 : bytes, alignment);
  return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment + (bytes == 0 ? alignment : 0));
}

void release(void* at) {
  if (at != nullptr && arena().has(at)) return arena().free(at);
  std::free(at);
}

void* allocate_or_throw(size_t bytes, size_t alignment) {
  void* at = allocate(bytes, alignment);
  if (at == nullptr) throw std::bad_alloc();
  return at;
}

class TensorMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    // Every element lies where its size allows it, as it does at any offset of a tensor. So a tensor ends exactly where
    // its pages end.
    void* at = bytes == 0 ? nullptr : allocate_or_throw(bytes, guard.on ? 1 : 64);
    return {at, at, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

}  // namespace

void guard_tensors() {
  static TensorMemory memory;
  c10::SetAllocator(c10::DeviceType::CPU, &memory, /*priority=*/100);
}

}  // namespace twobp::test

void* operator new(size_t bytes) {
  return twobp::test::allocate_or_throw(bytes, twobp::test::kWordAlignment);
}
void* operator new[](size_t bytes) {
  return twobp::test::allocate_or_throw(bytes, twobp::test::kWordAlignment);
}
void* operator new(size_t bytes, std::align_val_t alignment) {
  return twobp::test::allocate_or_throw(bytes, static_cast<size_t>(alignment));
}
void* operator new(size_t bytes, const std::nothrow_t& /*unused*/) noexcept {
  return twobp::test::allocate(bytes, twobp::test::kWordAlignment);
}
void operator delete(void* at) noexcept {
  twobp::test::release(at);
}
void operator delete[](void* at) noexcept {
  twobp::test::release(at);
}
void operator delete(void* at, size_t /*unused*/) noexcept {
  twobp::test::release(at);
}
void operator delete[](void* at, size_t /*unused*/) noexcept {
  twobp::test::release(at);
}
void operator delete(void* at, std::align_val_t /*unused*/) noexcept {
  twobp::test::release(at);
}
void operator delete(void* at, size_t /*unused*/, std::align_val_t /*unused*/) noexcept {
  twobp::test::release(at);
}
