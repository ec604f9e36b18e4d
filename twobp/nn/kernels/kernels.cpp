// Picks the kernels for the CPU at hand, once.
#include "twobp/nn/kernels/kernels.h"

namespace twobp {

#define TWOBP_DECLARE_ISA(isa)                 \
  namespace isa {                              \
  extern const Kernels<float> float_kernels;   \
  extern const Kernels<double> double_kernels; \
  }
TWOBP_DECLARE_ISA(baseline)
#ifdef TWOBP_X86_KERNELS
TWOBP_DECLARE_ISA(avx2)
TWOBP_DECLARE_ISA(avx512)
#endif

namespace {

enum class InstructionSet { kBaseline, kAvx2, kAvx512 };

InstructionSet detect() {
#ifdef TWOBP_X86_KERNELS
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512cd")) {
    return InstructionSet::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return InstructionSet::kAvx2;
#endif
  return InstructionSet::kBaseline;
}

const InstructionSet detected = detect();

template <typename T>
const Kernels<T>& pick(const Kernels<T>& baseline, [[maybe_unused]] const Kernels<T>& avx2,
                       [[maybe_unused]] const Kernels<T>& avx512) {
  if (detected == InstructionSet::kAvx512) return avx512;
  if (detected == InstructionSet::kAvx2) return avx2;
  return baseline;
}

}  // namespace

#ifndef TWOBP_X86_KERNELS
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
