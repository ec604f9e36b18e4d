// The memory that a rank's tensors leave behind, kept for the ones to come. A step asks for the sizes of the
// step before, so that after the first ones nothing is asked of the system any more: no call, no page that is
// touched for the first time.
//
// The first install() replaces LibTorch's allocator of CPU memory for the whole process, for good: tensors
// made before keep theirs, and threads without a cache get their memory from the system as before. Until then
// nothing of the process is changed. Under AddressSanitizer, which is to see where every tensor begins and
// ends, LibTorch's allocator stays and nothing is kept.
#pragma once

#include <cstdint>

namespace twobp {

class BlockCache {
 public:
  // Before the first thread is made that will have a cache. Any thread, any number of times.
  static void install();

  // While it lives, tensors made on this thread have their memory from a cache of its own, to which it
  // returns wherever they end; what is kept then goes back to the system with it. Within another one:
  // nothing. Needs install().
  class Use {
   public:
    Use();
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    bool outermost_;
  };

  // On the thread of a cache, now and then, when what is in use is there to stay: gives back what nobody has
  // asked for since 16 such calls. Between two calls no more is kept than twice what was in use beyond what
  // stays.
  static void begin_step();

  // Blocks that this thread's tensors have had from the system, since it began.
  static int64_t allocations();

 private:
  friend struct BlockAllocator;
  struct Store;
  struct Block;
};

}  // namespace twobp
