#include "twobp/nn/layers/attention_inputs.h"

#include <algorithm>

#include "twobp/core/check.h"
#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/values.h"

namespace twobp {

std::shared_ptr<const DocumentPlaces> documents_of(const Context& context, int64_t batch, int64_t positions) {
  if (context.fields == nullptr) return {};
  const auto found = context.fields->find(kDocumentStarts);
  if (found == context.fields->end()) return {};
  TWOBP_CHECK(found->second.scalar_type() == at::kLong && found->second.dim() == 2 && found->second.size(0) == batch &&
                  found->second.size(1) == positions,
              kDocumentStarts, " must be int64 (", batch, ", ", positions, "), got ",
              c10::toString(found->second.scalar_type()), " ", found->second.sizes());
  if (context.documents != nullptr && *context.documents) return *context.documents;
  const at::Tensor starts = found->second.cpu().contiguous();
  const int64_t* const all = starts.const_data_ptr<int64_t>();
  for (int64_t sample = 0; sample < batch; ++sample) {
    int64_t before = 0;
    for (int64_t i = 0; i < positions; ++i) {
      const int64_t start = all[sample * positions + i];
      const int64_t position = context.past + i;
      TWOBP_CHECK(start >= before && start <= position, kDocumentStarts, " of sample ", sample, " is ", start,
                  " at position ", position, ": it must be from ", before, " (its value at the position before) to ",
                  position, " (the position itself)");
      before = start;
    }
  }
  auto documents = std::make_shared<const DocumentPlaces>(starts);
  if (context.documents != nullptr) *context.documents = documents;
  return documents;
}

namespace {

// exp(kPadding) is 0 in every precision. The number is finite, so that a query that sees nothing but padding gives
// finite results.
constexpr double kPadding = -30000;

}  // namespace

at::Tensor padding_of(const Context& context, int64_t batch, int64_t positions, at::Device device) {
  const Fields* const fields = context.sliced() ? context.slice.sequences : context.fields;
  if (fields == nullptr) return {};
  const auto found = fields->find("attention_mask");
  if (found == fields->end()) return {};
  const at::Tensor mask = context.sliced() && found->second.dim() == 2 && found->second.size(1) >= positions
                              ? found->second.narrow(1, 0, positions)
                              : found->second;
  TWOBP_CHECK(mask.scalar_type() == at::kLong && mask.dim() == 2 && mask.size(0) == batch && mask.size(1) == positions,
              "attention_mask must be int64 (", batch, ", ", positions, "), got ", c10::toString(mask.scalar_type()),
              " ", mask.sizes());
  const at::Tensor padding = mask.eq(0);
  if (padding.is_cpu() && !padding.any().item<bool>()) return {};
  return on_device(padding, device);
}

at::Tensor shift_of(const at::Tensor& padding, const at::TensorOptions& options) {
  if (!padding.defined()) return {};
  return at::zeros(padding.sizes(), options).masked_fill_(padding, kPadding);
}

void leave_keys(const at::Tensor& packed, const PackedAttention& attention, bool keeps, Saved& saved) {
  if (keeps) {
    saved.to_later = {packed};
    return;
  }
  at::Tensor keys = at::empty({packed.size(0), packed.size(1), attention.kv_width()}, packed.options());
  if (attention.interleaved) {
    const int64_t width = attention.kv_heads * attention.head_dim;
    const at::Tensor heads = packed.unflatten(2, {attention.kv_heads, 3, attention.head_dim});
    keys.narrow(2, 0, width).copy_(heads.select(3, 1).flatten(2));
    keys.narrow(2, width, width).copy_(heads.select(3, 2).flatten(2));
  } else {
    keys.copy_(packed.narrow(2, attention.k_column(0), attention.kv_width()));
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
    TWOBP_CHECK(rows.size(0) == batch && (packed || rows.size(2) == attention.kv_width()),
                "attention over a slice finds keys ", rows.sizes(), " of an earlier slice, but needs (batch ", batch,
                ", positions, ", attention.kv_width(), " or ", attention.packed(), ")");
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
    const std::vector<int64_t> sizes{keys->rows.size(0), keys->rows.size(1), attention.kv_width()};
    const at::ScalarType type = compute_type(keys->rows.scalar_type());  // of sums
    if (before->from_later.empty()) before->from_later = {at::zeros(sizes, keys->rows.options().dtype(type))};
    keys->gradient = before->from_later[0];
    TWOBP_CHECK(keys->gradient.sizes() == sizes, "the gradient of an earlier slice's keys and values is ",
                keys->gradient.sizes(), ", but must be ", at::IntArrayRef(sizes));
    before = before->previous();
  }
}

}  // namespace twobp
