#include "twobp/nn/kernels/products/rows.h"

#include <algorithm>

#include "twobp/nn/kernels/products/products.h"
#include "twobp/nn/kernels/rows/operators.h"
#include "twobp/nn/values.h"

namespace twobp {
namespace {

constexpr int64_t kLine = 64;        // bytes
constexpr int64_t kLeastRow = 1024;  // bytes

}  // namespace

int64_t padded_cols(int64_t cols, const at::TensorOptions& options) {
  const at::ScalarType type = c10::typeMetaToScalarType(options.dtype());
  const int64_t bytes = cols * static_cast<int64_t>(c10::elementSize(type));
  const bool by_mkl = options.device().is_cpu() && (type == at::kFloat || type == at::kDouble);
  if (!by_mkl || one_dnn_multiplies() || bytes < kLeastRow) return cols;
  const int64_t lines = (bytes + kLine - 1) / kLine | 1;
  return lines * kLine / static_cast<int64_t>(c10::elementSize(type));
}

at::Tensor empty_rows(at::IntArrayRef sizes, const at::TensorOptions& options, bool padded) {
  if (!padded) return at::empty(sizes, options);
  std::vector<int64_t> whole = sizes.vec();
  whole.back() = padded_cols(sizes.back(), options);
  at::Tensor all = at::empty(whole, options);
  const std::vector<int64_t> strides = all.strides().vec();
  // Changes the tensor itself. A view would hold the memory a second time (exclusively_owned).
  all.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return all;
}

bool has_even_rows(const at::Tensor& tensor) {
  const int64_t dim = tensor.dim();
  if (tensor.is_contiguous()) return true;
  if (dim < 2 || tensor.stride(dim - 1) != 1 || tensor.stride(dim - 2) < tensor.size(dim - 1)) return false;
  for (int64_t i = dim - 2; i-- > 0;) {
    if (tensor.stride(i) != tensor.stride(i + 1) * tensor.size(i + 1)) return false;
  }
  return true;
}

at::Tensor with_even_rows(at::Tensor tensor) {
  if (has_even_rows(tensor)) return tensor;
  return tensor.contiguous();
}

at::Tensor own_even_rows(at::Tensor tensor) {
  if (exclusively_owned(tensor) && has_even_rows(tensor)) return tensor;
  return tensor.clone(at::MemoryFormat::Contiguous);
}

int64_t row_stride(const at::Tensor& tensor) {
  return tensor.dim() < 2 || tensor.is_contiguous() ? tensor.size(-1) : tensor.stride(-2);
}

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

at::Tensor concatenate_rows(std::span<const at::Tensor> parts) {
  int64_t rows = 0;
  for (const at::Tensor& part : parts) rows += part.size(0);
  at::Tensor all = empty_rows({rows, parts[0].size(1)}, parts[0].options(), /*padded=*/true);
  at::cat_out(all, at::TensorList(parts.data(), parts.size()), 0);
  return all;
}

}  // namespace twobp
