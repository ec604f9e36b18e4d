#include "twobp/nn/kernels/products/sum_rows.h"

#include <algorithm>

#include "twobp/nn/kernels/operators.h"
#include "twobp/nn/kernels/products/padded_rows.h"
#include "twobp/nn/kernels/products/rows.h"

namespace twobp {
namespace {

constexpr int64_t kBlockRows = 64;

}  // namespace

void add_sum_of_rows(at::Tensor& sum, const at::Tensor& matrix) {
  TWOBP_CHECK(matrix.dim() == 2 && sum.dim() == 1 && sum.size(0) == matrix.size(1),
              "the sum of the rows of a tensor of sizes ", matrix.sizes(), " cannot be added to sizes ", sum.sizes());
  if (by_operators(matrix)) {
    sum.add_(matrix.sum(0, /*keepdim=*/false, sum.scalar_type()));
    return;
  }
  const at::Tensor from = with_even_rows(matrix);
  const int64_t stride = row_stride(from);
  const int64_t rows = from.size(0);
  const int64_t cols = from.size(1);
  const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
  const at::Tensor sums = at::zeros({blocks, cols}, sum.options());
  dispatch_float(from.scalar_type(), "add_sum_of_rows", [&](auto zero) {
    using S = decltype(zero);
    const S* x = numbers<S>(from);
    auto* block_sums = mutable_numbers<Compute<S>>(sums);
    at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const int64_t row = block * kBlockRows;
        kernels<S>().add_rows(x + row * stride, stride, block_sums + block * cols, std::min(kBlockRows, rows - row),
                              cols);
      }
    });
  });
  sum.add_(sums.sum(0));
}

void add_row(at::Tensor& matrix, const at::Tensor& row) {
  TWOBP_CHECK(matrix.dim() == 2 && has_even_rows(matrix) && row.dim() == 1 && row.size(0) == matrix.size(1),
              "a row of sizes ", row.sizes(), " cannot be added to the rows of a tensor of sizes ", matrix.sizes());
  if (by_operators(matrix)) {
    matrix.add_(row);
    return;
  }
  const int64_t cols = matrix.size(1);
  const int64_t stride = row_stride(matrix);
  dispatch_float(matrix.scalar_type(), "add_row", [&](auto zero) {
    using S = decltype(zero);
    S* x = mutable_numbers<S>(matrix);
    const auto* added = numbers<Compute<S>>(row);
    for_rows(matrix.size(0), cols, [&](int64_t begin, int64_t end) {
      kernels<S>().add_row(x + begin * stride, stride, added, end - begin, cols);
    });
  });
}

}  // namespace twobp
