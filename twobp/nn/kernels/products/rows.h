// Rows of matrices: kernels over them (by dtype, split over the rank's threads), padded rows, their sums, and their
// concatenation.
#pragma once

#include <span>
#include <type_traits>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "twobp/core/check.h"
#include "twobp/nn/kernels/rows/row_kernels.h"

namespace twobp {

template <typename S>
constexpr at::ScalarType scalar_type_of() {
  if constexpr (std::is_same_v<S, BFloat16>) {
    return at::kBFloat16;
  } else if constexpr (std::is_same_v<S, Half>) {
    return at::kHalf;
  } else {
    return c10::CppTypeToScalarType<S>::value;
  }
}

// Checks what all kernels require: numbers of this type, in a CPU's memory.
template <typename S>
void check_numbers(const at::Tensor& tensor) {
  TWOBP_CHECK(tensor.scalar_type() == scalar_type_of<S>(), "a kernel takes ", c10::toString(scalar_type_of<S>()),
              ", got ", c10::toString(tensor.scalar_type()));
  TWOBP_CHECK(tensor.is_cpu(), "a kernel for CPUs got a tensor on ", tensor.device().str(),
              ": this layer does not run there yet");
}

// The tensor's numbers in the type that the kernels take.
template <typename S>
const S* numbers(const at::Tensor& tensor) {
  check_numbers<S>(tensor);
  return static_cast<const S*>(tensor.const_data_ptr());
}
template <typename S>
S* mutable_numbers(const at::Tensor& tensor) {
  check_numbers<S>(tensor);
  return static_cast<S*>(tensor.mutable_data_ptr());
}

// Calls body(S{}) with S float, double, BFloat16 or Half.
template <typename Body>
void dispatch_float(at::ScalarType type, const char* who, Body&& body) {
  if (type == at::kFloat) {
    body(float{});
  } else if (type == at::kDouble) {
    body(double{});
  } else if (type == at::kBFloat16) {
    body(BFloat16{});
  } else if (type == at::kHalf) {
    body(Half{});
  } else {
    fail(who, ": dtype ", c10::toString(type), " is not supported, only float32, float64, bfloat16 and float16");
  }
}

// Calls body(T{}) with T float or double. The tensor must have one of these dtypes.
template <typename Body>
void dispatch_wide(const at::Tensor& tensor, Body&& body) {
  if (tensor.scalar_type() == at::kFloat) {
    body(float{});
  } else {
    body(double{});
  }
}

// The dtype of sums of numbers of `type`, and of small vectors (norm gains, rotations).
inline at::ScalarType compute_type(at::ScalarType type) {
  return type == at::kDouble ? at::kDouble : at::kFloat;
}

// Calls body(begin, end) on ranges of rows, each of at least about 16 Ki numbers.
template <typename Body>
void for_rows(int64_t rows, int64_t cols, Body&& body) {
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, cols));
  at::parallel_for(0, rows, grain, std::forward<Body>(body));
}

// Matrices whose rows lie an odd number of cache lines apart.
//
// dW = dy^T x reads down dy's columns. If rows are a multiple of many cache lines apart, as with 1408 and 1536 float32
// numbers, the numbers of a column share a few sets of the first-level cache. MKL's product then takes 1.05 to 1.16
// times as long on a Xeon (benchmarks/product_benchmark). So a Linear pads the rows of its output if the next layer can
// read rows at any distance (Layer::pad_rows). The output's gradient takes the output's place and is padded too.

// The length of a padded row of `cols` numbers. It is more than `cols` in float32 and float64 on a CPU where MKL
// computes ATen's products, for rows of 1 KiB and more. Padding is then a few percent at most.
int64_t padded_cols(int64_t cols, const at::TensorOptions& options);

// An uninitialized tensor of `sizes`. If `padded`, its rows (the last dimension) lie padded_cols apart.
at::Tensor empty_rows(at::IntArrayRef sizes, const at::TensorOptions& options, bool padded);

// Whether the rows (the last dimension) are dense and equally far apart. They then form one matrix.
bool has_even_rows(const at::Tensor& tensor);

// The tensor itself if it has even rows (the caller's handle moves through), else a contiguous copy.
at::Tensor with_even_rows(at::Tensor tensor);

// For overwriting: the tensor itself if it has even rows and no other object holds it, else a contiguous copy.
at::Tensor own_even_rows(at::Tensor tensor);

// The distance from a row to the next, in numbers, of a tensor with even rows.
int64_t row_stride(const at::Tensor& tensor);

// Biases: adding them to every row of a matrix, and computing their gradients, which are sums over rows. Sums go in
// blocks of fixed size, so that the number of threads does not change a bit.

// sum (cols) += the rows of `matrix` (rows, cols). `matrix` has any float dtype, and `sum` has its compute_type.
void add_sum_of_rows(at::Tensor& sum, const at::Tensor& matrix);

// Each row of `matrix` (rows, cols), contiguous, += row (cols). `row` has the compute_type of `matrix`.
void add_row(at::Tensor& matrix, const at::Tensor& row);

// Joins the backward-p2 operands of several micro-batches into the operands of one GEMM.

// Copies the rows of (rows_i, cols) tensors below each other into new memory. The rows of the result are padded
// (padded_rows.h).
at::Tensor concatenate_rows(std::span<const at::Tensor> parts);

}  // namespace twobp
