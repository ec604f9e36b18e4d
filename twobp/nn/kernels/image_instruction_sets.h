// The image kernels of each instruction set, a namespace each: see instruction_sets.h.
#pragma once

#include "twobp/nn/kernels/image_kernels.h"
#include "twobp/nn/kernels/instruction_sets.h"

#define TWOBP_IMAGE_KERNEL_TABLES(linkage)                     \
  linkage const ImageKernels<float> float_image_kernels;       \
  linkage const ImageKernels<double> double_image_kernels;     \
  linkage const ImageKernels<BFloat16> bfloat16_image_kernels; \
  linkage const ImageKernels<Half> half_image_kernels;

namespace twobp {

namespace baseline {
TWOBP_IMAGE_KERNEL_TABLES(extern)
}
#if defined(__x86_64__)
namespace avx2 {
TWOBP_IMAGE_KERNEL_TABLES(extern)
}
namespace avx512 {
TWOBP_IMAGE_KERNEL_TABLES(extern)
}
#endif

}  // namespace twobp
