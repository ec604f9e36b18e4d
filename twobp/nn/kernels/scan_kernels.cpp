// Picks the kernels for the CPU at hand, once.
#include "twobp/nn/kernels/scan_kernels.h"

#include "twobp/nn/kernels/instruction_sets.h"

namespace twobp {
namespace {

#if !defined(__x86_64__)
namespace avx2 = baseline;
namespace avx512 = baseline;
#endif

template <typename S>
const ScanKernels<S>& pick(const ScanKernels<S>& baseline, const ScanKernels<S>& avx2,
                           const ScanKernels<S>& avx512) {
  static const ScanKernels<S>& picked = supports(InstructionSet::kAvx512) ? avx512
                                        : supports(InstructionSet::kAvx2) ? avx2
                                                                          : baseline;
  return picked;
}

}  // namespace

template <>
const ScanKernels<float>& scan_kernels<float>() {
  return pick(baseline::float_scan_kernels, avx2::float_scan_kernels, avx512::float_scan_kernels);
}

template <>
const ScanKernels<double>& scan_kernels<double>() {
  return pick(baseline::double_scan_kernels, avx2::double_scan_kernels, avx512::double_scan_kernels);
}

template <>
const ScanKernels<BFloat16>& scan_kernels<BFloat16>() {
  return pick(baseline::bfloat16_scan_kernels, avx2::bfloat16_scan_kernels, avx512::bfloat16_scan_kernels);
}

template <>
const ScanKernels<Half>& scan_kernels<Half>() {
  return pick(baseline::half_scan_kernels, avx2::half_scan_kernels, avx512::half_scan_kernels);
}

}  // namespace twobp
