#include "twobp/models/architecture.h"

#include <algorithm>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/models/types/all.h"

namespace twobp {

std::string_view item_name(ModelInput input) {
  switch (input) {
    case ModelInput::kImages:
      return "images";
    case ModelInput::kVectors:
      return "vectors";
    default:
      return "tokens";
  }
}

const std::vector<Architecture>& architectures() {
  static const std::vector<Architecture> all = {llama_architecture(), bert_architecture(),
                                                mamba_architecture(), resnet_architecture(),
                                                mlp_architecture()};
  return all;
}

std::vector<std::string> architecture_names() {
  std::vector<std::string> names;
  for (const Architecture& one : architectures()) names.push_back(one.type);
  return names;
}

std::string hf_models() {
  std::vector<std::string> names;
  for (const Architecture& one : architectures()) {
    if (!one.hf_type.empty()) names.push_back(concat(one.hf_type, " (", one.hf_class, ")"));
  }
  return join(names);
}

const Architecture& architecture(const std::string& type) {
  const auto& all = architectures();
  const auto found = std::find_if(all.begin(), all.end(), [&](const auto& one) { return one.type == type; });
  TWOBP_CHECK(found != all.end(), "unknown model type '", type, "': there are ", join(architecture_names()));
  return *found;
}

}  // namespace twobp
