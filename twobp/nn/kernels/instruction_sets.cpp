#include "twobp/nn/kernels/instruction_sets.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace twobp {

#if defined(__x86_64__)
namespace {

// __builtin_cpu_supports does not know F16C in clang 14.
bool supports_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

}  // namespace
#endif

bool supports(InstructionSet set) {
#if defined(__x86_64__)
  if (set == InstructionSet::kAvx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512cd") && supports_f16c();
  }
  if (set == InstructionSet::kAvx2) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && supports_f16c();
  }
#endif
  return set == InstructionSet::kBaseline;
}

bool is_amd() {
#if defined(__x86_64__)
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

const char* kernel_instruction_set() {
  if (supports(InstructionSet::kAvx512)) return "avx512";
  return supports(InstructionSet::kAvx2) ? "avx2" : "baseline";
}

}  // namespace twobp
