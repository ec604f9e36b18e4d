// Looks up the batch's fields, and finds room for results.
#include "twobp/nn/context.h"

#include <utility>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/nn/kernels/products/padded_rows.h"
#include "twobp/nn/slab.h"

namespace twobp {

const at::Tensor& Context::field(const std::string& name) const {
  TWOBP_CHECK(fields != nullptr, "the batch has no fields, but a layer needs \"", name, "\".");
  const auto found = fields->find(name);
  if (found != fields->end()) return found->second;
  std::vector<std::string> present;
  for (const auto& [key, tensor] : *fields) present.push_back(key);
  fail("the batch has no field \"", name, "\", which a layer needs; it has ",
       present.empty() ? "none" : join(present), ".");
}

at::Tensor Context::output(at::IntArrayRef sizes, const at::TensorOptions& options, bool padded) {
  Slab* slab =
      std::exchange(destination, nullptr);  // one that does not fit is not meant for a later layer either
  if (slab != nullptr && keeps() && !sizes.empty() && sizes.back() != 0) {
    const int64_t rows = c10::multiply_integers(sizes) / sizes.back();
    const at::Tensor slot = slab->slot(micro_batch, rows, sizes.back(), options);  // (rows, cols)
    const bool fits = slot.defined() && slot.scalar_type() == c10::typeMetaToScalarType(options.dtype()) &&
                      slot.device() == options.device();
    if (fits) return slot.view(sizes);
  }
  return empty_rows(sizes, options, padded);
}

}  // namespace twobp
