#include "twobp/nn/kernels/products/padded_rows.h"

#include "twobp/nn/kernels/products/one_dnn.h"
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

}  // namespace twobp
