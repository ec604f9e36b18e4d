#include "twobp/nn/kernels/products/concatenate_rows.h"

#include "twobp/nn/kernels/products/padded_rows.h"

namespace twobp {

at::Tensor concatenate_rows(std::span<const at::Tensor> parts) {
  int64_t rows = 0;
  for (const at::Tensor& part : parts) rows += part.size(0);
  at::Tensor all = empty_rows({rows, parts[0].size(1)}, parts[0].options(), /*padded=*/true);
  at::cat_out(all, at::TensorList(parts.data(), parts.size()), 0);
  return all;
}

}  // namespace twobp
