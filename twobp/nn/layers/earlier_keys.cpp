#include "twobp/nn/layers/earlier_keys.h"

#include <algorithm>

#include "twobp/core/check.h"
#include "twobp/nn/kernels/products/rows.h"

namespace twobp {
namespace {

int64_t kv_columns(const PackedAttention& attention) {
  return 2 * attention.kv_heads * attention.head_dim;
}

}  // namespace

void leave_keys(const at::Tensor& packed, const PackedAttention& attention, bool keeps, Saved& saved) {
  if (keeps) {
    saved.to_later = {packed};
    return;
  }
  const int64_t width = attention.kv_heads * attention.head_dim;
  at::Tensor keys = at::empty({packed.size(0), packed.size(1), 2 * width}, packed.options());
  if (attention.interleaved) {
    const at::Tensor heads = packed.unflatten(2, {attention.kv_heads, 3, attention.head_dim});
    keys.narrow(2, 0, width).copy_(heads.select(3, 1).flatten(2));
    keys.narrow(2, width, width).copy_(heads.select(3, 2).flatten(2));
  } else {
    keys.copy_(packed.narrow(2, attention.k_column(0), 2 * width));
  }
  saved.to_later = {std::move(keys)};
}

std::vector<EarlierKeys> earlier_keys(const Saved& saved, const PackedAttention& attention, int64_t batch,
                                      at::ScalarType type) {
  std::vector<EarlierKeys> earlier;
  for (const Saved* before = saved.previous(); before != nullptr; before = before->previous()) {
    TWOBP_CHECK(before->to_later.size() == 1,
                "attention over a slice does not find the keys of an earlier slice: run forward on the "
                "slices in order");
    const at::Tensor& rows = before->to_later[0];
    const bool packed = rows.size(2) == attention.packed();
    TWOBP_CHECK(rows.size(0) == batch && (packed || rows.size(2) == kv_columns(attention)),
                "attention over a slice finds keys ", rows.sizes(), " of an earlier slice, but needs (batch ", batch,
                ", positions, ", kv_columns(attention), " or ", attention.packed(), ")");
    earlier.push_back({rows.to(type), packed, {}});
  }
  std::reverse(earlier.begin(), earlier.end());
  return earlier;
}

void join_gradients(PackedAttention& attention, Saved& saved) {
  saved.to_later.clear();
  if (!saved.from_later.empty()) {
    attention.from_later = saved.from_later[0];
    saved.from_later.clear();
  }
  Saved* before = saved.previous();
  for (auto keys = attention.earlier.rbegin(); keys != attention.earlier.rend(); ++keys) {
    const std::vector<int64_t> sizes{keys->rows.size(0), keys->rows.size(1), kv_columns(attention)};
    const at::ScalarType type = compute_type(keys->rows.scalar_type());  // of sums
    if (before->from_later.empty()) before->from_later = {at::zeros(sizes, keys->rows.options().dtype(type))};
    keys->gradient = before->from_later[0];
    TWOBP_CHECK(keys->gradient.sizes() == sizes, "the gradient of an earlier slice's keys and values is ",
                keys->gradient.sizes(), ", but must be ", at::IntArrayRef(sizes));
    before = before->previous();
  }
}

}  // namespace twobp
