// Our own CPU kernels, where ATen has none that works in one pass over memory. Raw pointers, row-major, one
// call works on the rows it is given: the caller splits rows over threads. Every result depends on its row
// alone (sums over rows are the caller's), so the split does not change a bit.
//
// The same source is compiled for several instruction sets; `kernels<T>()` picks the best one this CPU has.
#pragma once

#include <cstdint>

#include "twobp/nn/kernels/instruction_sets.h"
#include "twobp/nn/kernels/number.h"

namespace twobp {

// S: as stored; T: as computed with, float for reduced precision.
template <typename S, typename T = Compute<S>>
struct Kernels {
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

  // Row r of scores (rows, cols) becomes softmax(scale * row) over its first `first` + r + 1 numbers and 0
  // beyond; log_sum_exp[r] = log(sum(exp(scale * row))) over the same.
  void (*causal_softmax)(T* scores, T* log_sum_exp, int64_t rows, int64_t cols, int64_t first, T scale);

  // `scores` as before causal_softmax become probabilities p again, dp = dL/dp become
  // dL/dscores = scale * p * (dp - dot(dy, y)), with y and dL/dy of the attention's output (rows, dim).
  void (*causal_softmax_backward)(T* scores, T* dp, const T* log_sum_exp, const T* y, const T* dy,
                                  int64_t rows, int64_t cols, int64_t first, T scale, int64_t dim,
                                  int64_t y_stride);

  // act = silu(g) * u for packed rows (g | u): x (rows, 2 * cols), act (rows, cols). SwiGLU, arXiv
  // 2002.05202.
  void (*swiglu_forward)(const S* x, S* act, int64_t rows, int64_t cols);

  // dx (rows, 2 * cols), may be x.
  void (*swiglu_backward)(const S* x, const S* dact, S* dx, int64_t rows, int64_t cols);

  // Per row: *loss = log(sum(exp(logits))) - logits[target]; logits become (softmax - onehot(target)) * scale
  // if `gradient`. A row whose target is `ignore` gets loss 0 and gradient 0. loss (rows) in double.
  void (*cross_entropy)(S* logits, const int64_t* targets, double* loss, int64_t rows, int64_t cols,
                        int64_t ignore, double scale, bool gradient);

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
