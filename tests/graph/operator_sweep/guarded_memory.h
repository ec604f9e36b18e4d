// Memory between pages that nobody may touch: an access outside a block ends the process (SIGSEGV). It holds what
// LibTorch allocates too, tensors and operator new, because its binaries have no AddressSanitizer.
#pragma once

#include <cstddef>
#include <cstdint>

namespace twobp::test {

struct Guard {
  bool on = false;                      // blocks come from guarded memory; otherwise from malloc
  bool at_end = true;                   // a block ends where its pages end; otherwise it begins where they begin
  unsigned char fill = 0;               // the bytes of a new block
  uint64_t most = uint64_t{64} << 20U;  // bytes of a block; larger ones are refused (std::bad_alloc)
};

// Of this process, which has one thread.
extern Guard guard;

// Makes LibTorch allocate the memory of tensors on the CPU here.
void guard_tensors();

}  // namespace twobp::test
