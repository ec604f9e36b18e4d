#include "python/native/given_fields.h"

#include <algorithm>
#include <string>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/data/array_dataset.h"
#include "twobp/nn/layers/attention_inputs.h"

namespace twobp::python {
namespace {

constexpr const char* kMask = "attention_mask";

std::vector<std::string> names_of(const ModelInput& input) {
  switch (input.kind) {
    case InputKind::kTokens:
    case InputKind::kMaskedTokens: {
      std::vector<std::string> names = {"input_ids", "labels", kMask};
      if (input.token_types > 0) names.emplace_back("token_type_ids");
      if (input.documents) names.emplace_back(kDocumentStarts);
      return names;
    }
    case InputKind::kImages:
      return {"pixel_values", "labels"};
    case InputKind::kVectors:
      return {"input", "target"};
    case InputKind::kFields:
      break;
  }
  return {};
}

}  // namespace

void check_given(const Fields& fields, const ModelInput& input) {
  if (input.kind == InputKind::kFields) return;
  const std::vector<std::string> names = names_of(input);
  for (const auto& [name, tensor] : fields) {
    TWOBP_CHECK(std::find(names.begin(), names.end(), name) != names.end(), "the example has the field '", name,
                "', but the model (", input.type, ") reads only ", join(names, ", "),
                ": leave it out, or pass the model as a module");
  }
}

Fields as_read(Fields fields, const ModelInput& input) {
  if (input.kind != InputKind::kTokens && input.kind != InputKind::kMaskedTokens) return fields;
  if (const auto mask = fields.find(kMask); mask != fields.end() && mask->second.scalar_type() != at::kLong)
    mask->second = mask->second.ne(0).to(at::kLong);
  if (input.kind == InputKind::kMaskedTokens) return fields;
  return to_predicting_positions(std::move(fields));
}

}  // namespace twobp::python
