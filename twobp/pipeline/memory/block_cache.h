// Keeps the memory that a rank's tensors free for later tensors. A step asks for the same sizes as the previous step.
// So after the first few steps, nothing is requested from the system any more: there are no system calls and no first
// touches of pages.
//
// The first install() replaces LibTorch's CPU allocator for the whole process, for good. Earlier tensors keep their
// memory. Threads without a cache still get their memory from the system. Before install(), nothing in the process is
// changed. AddressSanitizer must see where every tensor begins and ends, so under it LibTorch's allocator stays and
// nothing is kept.
#pragma once

#include <cstdint>
#include <memory>

namespace twobp {

class BlockCache {
 private:
  struct Store;
  struct Block;

 public:
  // Call before the first thread that will have a cache is made. Any thread may call it, any number of times.
  static void install();

  // While it lives, tensors made on this thread get their memory from the thread's own cache, and give it back to this
  // cache wherever they are freed. At the end the kept memory goes back to the system. Does nothing within another Use.
  // Needs install().
  class Use {
   public:
    Use();
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    bool outermost_;
  };

  // Call it now and then on a thread with a cache, when all memory in use is there to stay. Gives back memory that was
  // not used since 16 such calls, and at the first call all that is free. Between two calls, the cache keeps at most
  // twice the memory that came into use beyond the part that stays.
  static void begin_step();

  // The cache of this thread; null: none. A thread that works for it, in turn, may share it, and must end before it.
  static std::shared_ptr<Store> here();
  static void share(std::shared_ptr<Store> store);

  // The number of blocks that this thread's cache has requested from the system.
  static int64_t allocations();

 private:
  friend struct BlockAllocator;
};

}  // namespace twobp
