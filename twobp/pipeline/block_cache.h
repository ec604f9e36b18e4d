// The memory that a rank's tensors leave behind, kept for the ones to come. A step asks for the sizes of the
// step before, so that after the first ones nothing is asked of the system any more: no call, no page that is
// touched for the first time.
#pragma once

#include <cstdint>
#include <memory>

namespace twobp {

class BlockCache {
 public:
  // While it lives, tensors made on this thread have their memory from a cache of its own, to which it
  // returns wherever they end. With what is kept it is at most twice as much as was ever in use at once.
  class Use {
   public:
    Use();
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
  };

  // Blocks that this thread's tensors have had from the system, since it began.
  static int64_t allocations();

 private:
  friend struct BlockAllocator;
  struct Store;
  struct Block;
};

}  // namespace twobp
