#include "twobp/nn/kernels/instruction_sets.h"

namespace twobp {

bool supports(InstructionSet set) {
#if defined(__x86_64__)
  if (set == InstructionSet::kAvx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("f16c");
  }
  if (set == InstructionSet::kAvx2) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  }
#endif
  return set == InstructionSet::kBaseline;
}

const char* kernel_instruction_set() {
  if (supports(InstructionSet::kAvx512)) return "avx512";
  return supports(InstructionSet::kAvx2) ? "avx2" : "baseline";
}

}  // namespace twobp
