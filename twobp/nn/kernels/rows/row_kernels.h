// Our own CPU kernels, for operations that ATen does not compute in one pass over memory. Pointers are raw and matrices
// are row-major. A call works on the rows that it is given, and the caller splits rows over threads. Every result
// depends on its row alone (the caller sums over rows), so the split does not change a bit.
//
// The same source is compiled for several instruction sets; `kernels<T>()` selects the best one for this CPU.
#pragma once

#include <cstdint>

#include "twobp/nn/kernels/instruction_sets.h"
#include "twobp/nn/kernels/number.h"
#include "twobp/nn/kernels/rows/dropout.h"

namespace twobp {

// A block of attention's scores (rows, cols), one row per query and one column per key. Describes which keys a query
// attends to, and how its scores are transformed.
template <typename T>
struct ScoreBlock {
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t seen = 0;                 // columns that row 0 sees; each later row sees one more, at most all
  const int64_t* starts = nullptr;  // (rows), the first column that a row sees, which is one; null: column 0
  T scale = 1;                      // of the scores
  T cap = 0;                        // scaled scores become cap * tanh(score / cap); 0: they do not
  const T* shift = nullptr;         // (cols), added to the scaled scores; null: none
  DropoutMask dropout;              // of the probabilities; its column 0 is the first that a row sees
  int64_t row_begin = 0;            // number of row 0 in `dropout`
  int64_t mask_cols = 0;            // columns of `dropout`
};

// S is the stored type. T is the type of the computation: float for reduced precision.
template <typename S, typename T = Compute<S>>
struct Kernels {
  // sums (cols) += x's rows, which are `stride` numbers apart.
  void (*add_rows)(const S* x, int64_t stride, T* sums, int64_t rows, int64_t cols);
  // Each row of x += row (cols). The rows of x are `stride` numbers apart.
  void (*add_row)(S* x, int64_t stride, const T* row, int64_t rows, int64_t cols);

  // y = x * rstd * gain, rstd = 1 / sqrt(mean(x^2) + eps), a row at a time. RMSNorm, arXiv 1910.07467, eq. 4. x, y
  // (rows, cols); gain (cols); rstd (rows)
  void (*rms_norm_forward)(const S* x, const T* gain, S* y, T* rstd, int64_t rows, int64_t cols, double eps);

  // dx = rstd * (g - xhat * mean(g * xhat)), g = dy * gain, xhat = x * rstd; dgain += sum over rows of dy * xhat. dx
  // may be dy or x.
  void (*rms_norm_backward)(const S* dy, const S* x, const T* gain, const T* rstd, S* dx, T* dgain, int64_t rows,
                            int64_t cols);

  // Rotates the first 2 * half numbers of `heads` heads of each row in place: halves (a, b) -> (a cos - b sin, b cos +
  // a sin) (RoPE, arXiv 2104.09864, in the half-split layout of Hugging Face). Row r is at position r % positions. x
  // (rows, stride); heads begin `step` numbers apart; cos, sin (positions, half)
  // A sign of -1 rotates back.
  void (*rope)(S* x, const T* cos, const T* sin, T sign, int64_t rows, int64_t row_begin, int64_t stride, int64_t heads,
               int64_t step, int64_t half, int64_t positions);

  // In place: scores become p = softmax(s) over the columns that a row sees, with dropout applied, and 0 in the other
  // columns. s = scale * scores, capped, + shift. log_sum[r] = log(sum(exp(s))) over the columns that row r sees.
  void (*softmax_forward)(const ScoreBlock<T>& block, T* scores, T* log_sum);

  // Recomputes p from the scores and log_sum. scores become p after dropout. dp, the gradient of p after dropout,
  // becomes the gradient of the scores: scale * p * (mask * dp - dot(dy, y)), times the slope of the cap. y is the
  // attention's output and dy its gradient, with rows of `dim` numbers that are `y_stride` apart.
  void (*softmax_backward)(const ScoreBlock<T>& block, T* scores, T* dp, const T* log_sum, const T* y, const T* dy,
                           int64_t dim, int64_t y_stride);

  // act = silu(g) * u for packed rows (g | u), `stride` numbers apart: x (rows, 2 * cols), act (rows, cols). SwiGLU,
  // arXiv 2002.05202.
  void (*swiglu_forward)(const S* x, int64_t stride, S* act, int64_t rows, int64_t cols);

  // dx (rows, 2 * cols) may be x. Its rows are `dx_stride` apart.
  void (*swiglu_backward)(const S* x, int64_t stride, const S* dact, S* dx, int64_t dx_stride, int64_t rows,
                          int64_t cols);

  // For each row; rows are `stride` numbers apart. *loss = log(sum(exp(logits))) - logits[target]. If `gradient`,
  // logits become (softmax - onehot(target)) * scale. A row whose target is `ignore` gets loss 0 and gradient 0. loss
  // (rows) is in double.
  void (*cross_entropy)(S* logits, int64_t stride, const int64_t* targets, double* loss, int64_t rows, int64_t cols,
                        int64_t ignore, double scale, bool gradient);

  // x = cap * tanh(x / cap), in place. slope (n) = 1 - tanh(x / cap)^2, its derivative. Gemma 2, arXiv 2408.00118,
  // section 2.
  void (*soft_cap)(S* x, T* slope, int64_t n, T cap);
  // x *= factor, elementwise.
  void (*multiply)(S* x, const T* factor, int64_t n);

  // sum(x^2), in blocks of fixed size. The sum within a block is in float, the sum of the blocks in double.
  double (*sum_of_squares)(const S* x, int64_t n);
};

TWOBP_KERNEL_FAMILY(Kernels, kernels)

// The best kernels for this CPU.
template <typename S>
const Kernels<S>& kernels() {
  static const KernelTable<Kernels>& best = kernels_tables().best();
  return best.of<S>();
}

// Kernels of BERT's layers, under the rules of kernels.h: LayerNorm, GELU (also as a gate), dropout. They are compiled
// for several instruction sets, and `encoder_kernels<S>()` selects one.
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
