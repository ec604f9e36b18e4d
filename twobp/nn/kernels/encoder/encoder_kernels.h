// Kernels of BERT's layers, under the rules of kernels.h: LayerNorm, GELU (also as a gate), dropout. They are compiled
// for several instruction sets, and `encoder_kernels<S>()` selects one.
#pragma once

#include "twobp/nn/kernels/encoder/dropout.h"
#include "twobp/nn/kernels/kernels.h"

namespace twobp {

enum class GeluForm : uint8_t {
  kErf,   // x (1 + erf(x / sqrt(2))) / 2
  kTanh,  // x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2; arXiv 1606.08415, section 2
};

template <typename S, typename T = Compute<S>>
struct EncoderKernels {
  // y = xhat * gain + bias, xhat = (x - mean) * rstd, rstd = 1 / sqrt(mean((x - mean)^2) + eps), a row at a time.
  // LayerNorm, arXiv 1607.06450. x, y (rows, cols); gain, bias (cols); mean, rstd (rows)
  void (*layer_norm_forward)(const S* x, const T* gain, const T* bias, S* y, T* mean, T* rstd, int64_t rows,
                             int64_t cols, double eps);

  // dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), g = dy * gain; dgain += sum over rows of dy * xhat, dbias += sum
  // over rows of dy. dx may be dy or x.
  void (*layer_norm_backward)(const S* dy, const S* x, const T* gain, const T* mean, const T* rstd, S* dx, T* dgain,
                              T* dbias, int64_t rows, int64_t cols);

  // y may be x.
  void (*gelu_forward)(const S* x, S* y, int64_t n, GeluForm form);
  // dx = dy * gelu'(x); dx may be dy. act = gelu(x); act may be x, or null if it is not wanted.
  void (*gelu_backward)(const S* x, const S* dy, S* dx, S* act, int64_t n, GeluForm form);

  // act = gelu(g) * u for packed rows (g | u), `stride` numbers apart: x (rows, 2 * cols), act (rows, cols). GeGLU,
  // arXiv 2002.05202.
  void (*geglu_forward)(const S* x, int64_t stride, S* act, int64_t rows, int64_t cols, GeluForm form);
  // dx (rows, 2 * cols) may be x. Its rows are `dx_stride` apart.
  void (*geglu_backward)(const S* x, int64_t stride, const S* dact, S* dx, int64_t dx_stride, int64_t rows,
                         int64_t cols, GeluForm form);

  // y = mask * x, or y = mask * x + add. y may be x. Row r has row number row_begin + r in the mask.
  void (*dropout)(const S* x, const S* add, S* y, int64_t rows, int64_t cols, const DropoutMask& mask,
                  int64_t row_begin);
};

TWOBP_KERNEL_FAMILY(EncoderKernels, encoder_kernels)

// The best kernels for this CPU.
template <typename S>
const EncoderKernels<S>& encoder_kernels() {
  static const KernelTable<EncoderKernels>& best = encoder_kernels_tables().best();
  return best.of<S>();
}

}  // namespace twobp
