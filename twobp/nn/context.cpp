#include "twobp/nn/context.h"

#include <vector>

#include "twobp/core/check.h"
#include "twobp/core/text.h"

namespace twobp {

Fields slice_of(const Fields& fields, int64_t begin, int64_t length) {
  Fields part;
  for (const auto& [name, field] : fields) {
    TWOBP_CHECK(field.dim() >= 2 && field.size(1) >= begin + length, "the field \"", name, "\" of sizes ",
                field.sizes(), " has no positions ", begin, " to ", begin + length - 1, " for a slice");
    part.emplace(name, field.narrow(1, begin, length));
  }
  return part;
}

const at::Tensor& Context::field(const std::string& name) const {
  TWOBP_CHECK(fields != nullptr, "the batch has no fields, but a layer needs \"", name, "\".");
  const auto found = fields->find(name);
  if (found != fields->end()) return found->second;
  std::vector<std::string> present;
  for (const auto& [key, tensor] : *fields) present.push_back(key);
  fail("the batch has no field \"", name, "\", which a layer needs; it has ",
       present.empty() ? "none" : join(present), ".");
}

}  // namespace twobp
