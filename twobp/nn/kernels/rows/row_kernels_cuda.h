// Kernels of our own for a GPU, on raw device pointers: functions of rows that LibTorch's operators would compute in
// several passes over memory. nvcc compiles them if it exists; rows_by_cuda.cpp calls them. Calls only queue work on
// the stream, and return a cudaError_t: 0 if the work was queued. Sums are taken in an order that depends on the sizes
// alone, and those of a row on its own numbers alone.
//
// A type is that of x and of what has its shape. Gains, statistics, cos and sin have the wide type: double for double,
// else float. A stride is the distance between the first numbers of rows; rows are dense without one.
#pragma once

#include <cstdint>

#include "twobp/nn/kernels/rows/row_arguments.h"

namespace twobp {

enum class CudaNumber { kFloat, kDouble, kBFloat16, kHalf };

struct CudaRows {
  CudaNumber type = CudaNumber::kFloat;
  int64_t rows = 0;
  int64_t cols = 0;
  void* stream = nullptr;  // cudaStream_t
};

// y = x rstd gain: x, y (rows, cols), gain (cols), rstd (rows).
int cuda_rms_norm_forward(const CudaRows& on, const void* x, const void* gain, double eps, void* y, void* rstd);
// dgain (cuda_gain_blocks(rows), cols): a sum for each block of rows. `dx` may be `dy`.
int64_t cuda_gain_blocks(int64_t rows);
int cuda_rms_norm_backward(const CudaRows& on, const void* dy, const void* x, const void* gain, const void* rstd,
                           void* dx, void* dgain);

// y = (x - mean) rstd gain + bias: x, y (rows, cols), gain and bias (cols), statistics (2, rows): mean, rstd.
int cuda_layer_norm_forward(const CudaRows& on, const void* x, const void* gain, const void* bias, double eps, void* y,
                            void* statistics);
// sums (2, cuda_gain_blocks(rows), cols): of dgain and of dbias, for each block of rows. `dx` may be `dy` or `x`.
int cuda_layer_norm_backward(const CudaRows& on, const void* dy, const void* x, const void* gain,
                             const void* statistics, void* dx, void* sums);

// Rotates heads of rows in place: of each head's first 2 * half numbers, number i with number i + half.
struct CudaRope {
  int64_t stride = 0;
  int64_t heads = 0, step = 0, first = 0;  // as in RowHeads (rope.h)
  int64_t half = 0;
  int64_t positions = 0;  // row r has position r % positions
  double direction = 1;   // -1: back
};
int cuda_rope(const CudaRows& on, const CudaRope& rope, void* x, const void* cos, const void* sin);

// x (rows, 2 * cols), act (rows, cols): act = gate(x's first half) * (its second half).
int cuda_glu_forward(const CudaRows& on, Gate gate, const void* x, int64_t stride, void* act);
// `dx` may be `x`.
int cuda_glu_backward(const CudaRows& on, Gate gate, const void* x, int64_t stride, const void* dact, void* dx,
                      int64_t dx_stride);

// losses (rows), float64: 0 where the target is `ignore`, NaN where it is no column. With `gradient`, a row of logits
// becomes scale * (softmax - one_hot(target)), or 0 where the target is `ignore`. If `device_scale` is not null, the
// kernel reads the scale there.
int cuda_cross_entropy(const CudaRows& on, void* logits, int64_t stride, const int64_t* targets, int64_t ignore,
                       double scale, const double* device_scale, bool gradient, double* losses);

// out (rows, cols): the mask's factors of these rows, 0 or its scale (dropout.h).
int cuda_dropout_factors(const CudaRows& on, const DropoutMask& mask, const int64_t* rows, void* out);

// sums, float64: of the squares of each block of kSquareBlock numbers of x (rows * cols).
int cuda_sums_of_squares(const CudaRows& on, const void* x, double* sums);

}  // namespace twobp
