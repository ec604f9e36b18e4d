// Matrices whose rows lie an odd number of cache lines apart.
//
// dW = dy^T x reads down dy's columns. If rows are a multiple of many cache lines apart, as with 1408 and 1536 float32
// numbers, the numbers of a column share a few sets of the first-level cache. MKL's product then takes 1.05 to 1.16
// times as long on a Xeon (benchmarks/product_benchmark). So a Linear pads the rows of its output if the next layer can
// read rows at any distance (Layer::pad_rows). The output's gradient takes the output's place and is padded too.
#pragma once

#include <ATen/ATen.h>

namespace twobp {

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

}  // namespace twobp
