// Kernels of BERT's layers, under the rules of kernels.h: LayerNorm, GELU, dropout, the softmax of attention
// with dropout, sums of rows. Compiled for several instruction sets; `encoder_kernels<S>()` picks.
#pragma once

#include "twobp/nn/kernels/dropout.h"
#include "twobp/nn/kernels/kernels.h"

namespace twobp {

enum class GeluForm : uint8_t {
  kErf,   // x (1 + erf(x / sqrt(2))) / 2
  kTanh,  // x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2; arXiv 1606.08415, section 2
};

template <typename S, typename T = Compute<S>>
struct EncoderKernels {
  // sums (cols) += x's rows.
  void (*add_rows)(const S* x, T* sums, int64_t rows, int64_t cols);
  // Each row of x += row (cols).
  void (*add_row)(S* x, const T* row, int64_t rows, int64_t cols);

  // y = xhat * gain + bias, xhat = (x - mean) * rstd, rstd = 1 / sqrt(mean((x - mean)^2) + eps), a row at a
  // time. LayerNorm, arXiv 1607.06450. x, y (rows, cols); gain, bias (cols); mean, rstd (rows)
  void (*layer_norm_forward)(const S* x, const T* gain, const T* bias, S* y, T* mean, T* rstd, int64_t rows,
                             int64_t cols, double eps);

  // dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), g = dy * gain; dgain += sum over rows of dy * xhat,
  // dbias += that of dy. dx may be dy or x.
  void (*layer_norm_backward)(const S* dy, const S* x, const T* gain, const T* mean, const T* rstd, S* dx,
                              T* dgain, T* dbias, int64_t rows, int64_t cols);

  // y may be x.
  void (*gelu_forward)(const S* x, S* y, int64_t n, GeluForm form);
  // dx = dy * gelu'(x), may be dy; act = gelu(x), may be x, null: not wanted.
  void (*gelu_backward)(const S* x, const S* dy, S* dx, S* act, int64_t n, GeluForm form);

  // y = mask * x, or y = mask * x + add. y may be x. Row r has row number row_begin + r in the mask.
  void (*dropout)(const S* x, const S* add, S* y, int64_t rows, int64_t cols, const DropoutMask& mask,
                  int64_t row_begin);

  // Attention's softmax in place: p = softmax(scale * scores + shift), dropped by the mask; log_sum is
  // log(sum(exp(scale * scores + shift))) of each row. scores (rows, cols); shift (cols) or null.
  void (*softmax_forward)(T* scores, const T* shift, T* log_sum, int64_t rows, int64_t cols, double scale,
                          const DropoutMask& mask, int64_t row_begin);
  // From the scores and log_sum again: scores become the dropped p, and dp, the gradient of those, that of
  // the scores: scale * p * (mask * dp - dot(dy, y)), with y and dL/dy of the attention's output, rows of
  // `dim` numbers, `y_stride` apart.
  void (*softmax_backward)(T* scores, T* dp, const T* shift, const T* log_sum, const T* y, const T* dy,
                           int64_t rows, int64_t cols, double scale, const DropoutMask& mask,
                           int64_t row_begin, int64_t dim, int64_t y_stride);
};

TWOBP_KERNEL_FAMILY(EncoderKernels, encoder_kernels)

// The best for this CPU.
template <typename S>
const EncoderKernels<S>& encoder_kernels() {
  static const KernelTable<EncoderKernels>& best = encoder_kernels_tables().best();
  return best.of<S>();
}

}  // namespace twobp
