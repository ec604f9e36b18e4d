#include "twobp/nn/layers/padding.h"

#include "twobp/core/check.h"
#include "twobp/nn/values.h"

namespace twobp {
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

}  // namespace twobp
