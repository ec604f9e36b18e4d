// Picks the kernels for the CPU at hand, once.
#include "twobp/nn/kernels/instruction_sets.h"

namespace twobp {
namespace {

InstructionSet detect() {
  if (supports(InstructionSet::kAvx512)) return InstructionSet::kAvx512;
  if (supports(InstructionSet::kAvx2)) return InstructionSet::kAvx2;
  return InstructionSet::kBaseline;
}

const InstructionSet detected = detect();

template <typename S>
const Kernels<S>& pick(const Kernels<S>& baseline, const Kernels<S>& avx2, const Kernels<S>& avx512) {
  if (detected == InstructionSet::kAvx512) return avx512;
  if (detected == InstructionSet::kAvx2) return avx2;
  return baseline;
}

}  // namespace

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

#if !defined(__x86_64__)
namespace avx2 = baseline;
namespace avx512 = baseline;
#endif

template <>
const Kernels<float>& kernels<float>() {
  return pick(baseline::float_kernels, avx2::float_kernels, avx512::float_kernels);
}

template <>
const Kernels<double>& kernels<double>() {
  return pick(baseline::double_kernels, avx2::double_kernels, avx512::double_kernels);
}

template <>
const Kernels<BFloat16>& kernels<BFloat16>() {
  return pick(baseline::bfloat16_kernels, avx2::bfloat16_kernels, avx512::bfloat16_kernels);
}

template <>
const Kernels<Half>& kernels<Half>() {
  return pick(baseline::half_kernels, avx2::half_kernels, avx512::half_kernels);
}

const char* kernel_instruction_set() {
  switch (detected) {
    case InstructionSet::kAvx512:
      return "avx512";
    case InstructionSet::kAvx2:
      return "avx2";
    default:
      return "baseline";
  }
}

}  // namespace twobp
