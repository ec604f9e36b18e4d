// The kernels of each instruction set, a namespace each: what kernels.cpp chooses from, and the tests go
// through.
#pragma once

#include "twobp/nn/kernels/kernels.h"

#define TWOBP_KERNEL_TABLES(linkage)                \
  linkage const Kernels<float> float_kernels;       \
  linkage const Kernels<double> double_kernels;     \
  linkage const Kernels<BFloat16> bfloat16_kernels; \
  linkage const Kernels<Half> half_kernels;

namespace twobp {

namespace baseline {
TWOBP_KERNEL_TABLES(extern)
}
#if defined(__x86_64__)
namespace avx2 {
TWOBP_KERNEL_TABLES(extern)
}
namespace avx512 {
TWOBP_KERNEL_TABLES(extern)
}
#endif

// What this CPU can run, and what `kernels` picks: the last of them.
enum class InstructionSet { kBaseline, kAvx2, kAvx512 };
bool supports(InstructionSet set);

}  // namespace twobp
