// Picks the kernels for the CPU at hand, once.
#include "twobp/nn/kernels/encoder_kernels.h"

#include "twobp/nn/kernels/instruction_sets.h"

namespace twobp {
namespace {

#if !defined(__x86_64__)
namespace avx2 = baseline;
namespace avx512 = baseline;
#endif

template <typename S>
const EncoderKernels<S>& pick(const EncoderKernels<S>& baseline, const EncoderKernels<S>& avx2,
                              const EncoderKernels<S>& avx512) {
  static const EncoderKernels<S>& picked = supports(InstructionSet::kAvx512) ? avx512
                                           : supports(InstructionSet::kAvx2) ? avx2
                                                                             : baseline;
  return picked;
}

}  // namespace

template <>
const EncoderKernels<float>& encoder_kernels<float>() {
  return pick(baseline::float_encoder_kernels, avx2::float_encoder_kernels, avx512::float_encoder_kernels);
}

template <>
const EncoderKernels<double>& encoder_kernels<double>() {
  return pick(baseline::double_encoder_kernels, avx2::double_encoder_kernels, avx512::double_encoder_kernels);
}

template <>
const EncoderKernels<BFloat16>& encoder_kernels<BFloat16>() {
  return pick(baseline::bfloat16_encoder_kernels, avx2::bfloat16_encoder_kernels,
              avx512::bfloat16_encoder_kernels);
}

template <>
const EncoderKernels<Half>& encoder_kernels<Half>() {
  return pick(baseline::half_encoder_kernels, avx2::half_encoder_kernels, avx512::half_encoder_kernels);
}

}  // namespace twobp
