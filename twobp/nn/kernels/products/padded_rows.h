// Matrices whose rows lie an odd number of cache lines apart.
//
// dW = dy^T x reads down dy's columns. Where rows are a multiple of many lines apart, as 1408 and 1536
// float32 are, a column's numbers share a few sets of the first cache, and MKL's product takes longer: 1.05
// to 1.16 times on a Xeon (benchmarks/product_benchmark). So a Linear whose output goes to a layer that reads
// rows at any distance pads them (Layer::pad_rows), and that output's gradient, which takes its place, is
// padded too.
#pragma once

#include <ATen/ATen.h>

namespace twobp {

// How many numbers a padded row of `cols` takes: more than `cols` in float32 and float64 on a CPU where
// ATen's products are MKL's, for rows of 1 KiB and more, so that padding is a few percent at most.
int64_t padded_cols(int64_t cols, const at::TensorOptions& options);

// Of `sizes`; with `padded`, its rows (the last dimension) are of padded_cols.
at::Tensor empty_rows(at::IntArrayRef sizes, const at::TensorOptions& options, bool padded);

// Whether the rows (the last dimension) are dense and all equally far apart, and so one matrix.
bool has_even_rows(const at::Tensor& tensor);

// The tensor itself if it has even rows (the caller's handle moves through), else a contiguous copy.
at::Tensor with_even_rows(at::Tensor tensor);

// To write over: the tensor itself if nobody else holds it and it has even rows, else a contiguous copy.
at::Tensor own_even_rows(at::Tensor tensor);

// From a row to the next one, in numbers, of a tensor with even rows.
int64_t row_stride(const at::Tensor& tensor);

}  // namespace twobp
