// Our own CPU kernels, where ATen has none that works in one pass over memory. Raw pointers, row-major, one
// call works on the rows it is given: the caller splits rows over threads. Every result depends on its row
// alone (sums over rows are the caller's), so the split does not change a bit.
//
// The same source is compiled for several instruction sets; `kernels<T>()` picks the best one this CPU has.
#pragma once

#include <cstdint>

#include "twobp/nn/kernels/encoder/dropout.h"
#include "twobp/nn/kernels/instruction_sets.h"
#include "twobp/nn/kernels/number.h"

namespace twobp {

// A block of attention's scores (rows, cols), one row a query, one column a key: which keys a query meets,
// and what becomes of its scores.
template <typename T>
struct ScoreBlock {
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t seen = 0;          // by row 0, a column more by each row after it, at most all
  T scale = 1;               // of the scores
  const T* shift = nullptr;  // (cols), added to the scaled scores; null: nothing
  DropoutMask dropout;       // of the probabilities
  int64_t row_begin = 0;     // row 0's number in `dropout`
};

// S: as stored; T: as computed with, float for reduced precision.
template <typename S, typename T = Compute<S>>
struct Kernels {
  // sums (cols) += x's rows, which are `stride` numbers apart.
  void (*add_rows)(const S* x, int64_t stride, T* sums, int64_t rows, int64_t cols);
  // Each row of x += row (cols), likewise.
  void (*add_row)(S* x, int64_t stride, const T* row, int64_t rows, int64_t cols);

  // y = x * rstd * gain, rstd = 1 / sqrt(mean(x^2) + eps), a row at a time. RMSNorm, arXiv 1910.07467, eq. 4.
  // x, y (rows, cols); gain (cols); rstd (rows)
  void (*rms_norm_forward)(const S* x, const T* gain, S* y, T* rstd, int64_t rows, int64_t cols, double eps);

  // dx = rstd * (g - xhat * mean(g * xhat)), g = dy * gain, xhat = x * rstd; dgain += sum over rows of dy *
  // xhat. dx may be dy or x.
  void (*rms_norm_backward)(const S* dy, const S* x, const T* gain, const T* rstd, S* dx, T* dgain,
                            int64_t rows, int64_t cols);

  // Rotates the first `heads` heads of each row in place: halves (a, b) -> (a cos - b sin, b cos + a sin)
  // (RoPE, arXiv 2104.09864, in the half-split layout of Hugging Face). Row r is at position r % positions.
  // x (rows, stride), a head has 2 * half numbers; cos, sin (positions, half)
  void (*rope_forward)(S* x, const T* cos, const T* sin, int64_t rows, int64_t row_begin, int64_t stride,
                       int64_t heads, int64_t half, int64_t positions);

  // The inverse rotation, likewise in place.
  void (*rope_backward)(S* x, const T* cos, const T* sin, int64_t rows, int64_t row_begin, int64_t stride,
                        int64_t heads, int64_t half, int64_t positions);

  // In place: scores become p = softmax(scale * scores + shift) over the columns that a row sees, dropped by
  // the mask, and 0 beyond; log_sum[r] = log(sum(exp(scale * scores + shift))) over the same.
  void (*softmax_forward)(const ScoreBlock<T>& block, T* scores, T* log_sum);

  // From the scores and log_sum again: scores become the dropped p, and dp, the gradient of those, that of
  // the scores: scale * p * (mask * dp - dot(dy, y)), with y and dL/dy of the attention's output, rows of
  // `dim` numbers, `y_stride` apart.
  void (*softmax_backward)(const ScoreBlock<T>& block, T* scores, T* dp, const T* log_sum, const T* y,
                           const T* dy, int64_t dim, int64_t y_stride);

  // act = silu(g) * u for packed rows (g | u), `stride` numbers apart: x (rows, 2 * cols), act (rows, cols).
  // SwiGLU, arXiv 2002.05202.
  void (*swiglu_forward)(const S* x, int64_t stride, S* act, int64_t rows, int64_t cols);

  // dx (rows, 2 * cols), its rows `dx_stride` apart, may be x.
  void (*swiglu_backward)(const S* x, int64_t stride, const S* dact, S* dx, int64_t dx_stride, int64_t rows,
                          int64_t cols);

  // Per row, `stride` numbers apart: *loss = log(sum(exp(logits))) - logits[target]; logits become (softmax -
  // onehot(target)) * scale if `gradient`. A row whose target is `ignore` gets loss 0 and gradient 0. loss
  // (rows) in double.
  void (*cross_entropy)(S* logits, int64_t stride, const int64_t* targets, double* loss, int64_t rows,
                        int64_t cols, int64_t ignore, double scale, bool gradient);

  // sum(x^2), in blocks of fixed size: float within a block, double between them.
  double (*sum_of_squares)(const S* x, int64_t n);
};

TWOBP_KERNEL_FAMILY(Kernels, kernels)

// The best for this CPU.
template <typename S>
const Kernels<S>& kernels() {
  static const KernelTable<Kernels>& best = kernels_tables().best();
  return best.of<S>();
}

}  // namespace twobp
