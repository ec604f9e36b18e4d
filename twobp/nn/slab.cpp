#include "twobp/nn/slab.h"

#include "twobp/nn/kernels/products/padded_rows.h"

namespace twobp {

at::Tensor Slab::slot(int64_t micro_batch, int64_t rows, int64_t cols, const at::TensorOptions& options) {
  if (!ring_.defined()) {
    slot_rows_ = rows;
    ring_ = empty_rows({slots_ * rows, cols}, options, padded_);
  }
  if (rows > slot_rows_ || cols != ring_.size(1)) return {};
  return ring_.narrow(0, (micro_batch % slots_) * slot_rows_, rows);
}

at::Tensor Slab::place(const at::Tensor& tensor, int64_t micro_batch) {
  at::Tensor destination = slot(micro_batch, tensor.size(0), tensor.size(1), tensor.options());
  if (!destination.defined() || destination.data_ptr() == tensor.data_ptr()) return tensor;
  destination.copy_(tensor);
  ++copies_;
  return destination;
}

std::vector<at::Tensor> concatenate_rows(std::span<const at::Tensor> parts, bool copy) {
  if (copy) {
    int64_t rows = 0;
    for (const at::Tensor& part : parts) rows += part.size(0);
    at::Tensor all = empty_rows({rows, parts[0].size(1)}, parts[0].options(), /*padded=*/true);
    at::cat_out(all, at::TensorList(parts.data(), parts.size()), 0);
    return {std::move(all)};
  }
  std::vector<at::Tensor> runs;
  for (size_t i = 0; i < parts.size();) {
    const at::Tensor& first = parts[i];
    int64_t rows = first.size(0);
    size_t next = i + 1;
    while (next < parts.size() && parts[next].storage().is_alias_of(first.storage()) &&
           has_even_rows(first) && has_even_rows(parts[next]) && parts[next].size(1) == first.size(1) &&
           row_stride(parts[next]) == row_stride(first) &&
           parts[next].storage_offset() == first.storage_offset() + rows * row_stride(first)) {
      rows += parts[next++].size(0);
    }
    runs.push_back(next == i + 1 ? first : first.as_strided({rows, first.size(1)}, {row_stride(first), 1}));
    i = next;
  }
  return runs;
}

}  // namespace twobp
