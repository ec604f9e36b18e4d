// Picks the image kernels for the CPU at hand, once.
#include "twobp/nn/kernels/image_instruction_sets.h"

namespace twobp {
namespace {

template <typename S>
const ImageKernels<S>& pick(const ImageKernels<S>& baseline, const ImageKernels<S>& avx2,
                            const ImageKernels<S>& avx512) {
  static const InstructionSet set = supports(InstructionSet::kAvx512) ? InstructionSet::kAvx512
                                    : supports(InstructionSet::kAvx2) ? InstructionSet::kAvx2
                                                                      : InstructionSet::kBaseline;
  if (set == InstructionSet::kAvx512) return avx512;
  return set == InstructionSet::kAvx2 ? avx2 : baseline;
}

}  // namespace

#if !defined(__x86_64__)
namespace avx2 = baseline;
namespace avx512 = baseline;
#endif

template <>
const ImageKernels<float>& image_kernels<float>() {
  return pick(baseline::float_image_kernels, avx2::float_image_kernels, avx512::float_image_kernels);
}

template <>
const ImageKernels<double>& image_kernels<double>() {
  return pick(baseline::double_image_kernels, avx2::double_image_kernels, avx512::double_image_kernels);
}

template <>
const ImageKernels<BFloat16>& image_kernels<BFloat16>() {
  return pick(baseline::bfloat16_image_kernels, avx2::bfloat16_image_kernels, avx512::bfloat16_image_kernels);
}

template <>
const ImageKernels<Half>& image_kernels<Half>() {
  return pick(baseline::half_image_kernels, avx2::half_image_kernels, avx512::half_image_kernels);
}

}  // namespace twobp
