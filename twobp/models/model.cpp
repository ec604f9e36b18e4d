#include "twobp/models/model.h"

namespace twobp {

std::map<std::string, int> uses_of_weights(const ModelSpec& model) {
  std::map<std::string, int> uses;
  for (const LayerSpec& spec : model.layers) {
    const auto layer = spec.make();
    for (const Parameter* parameter : parameters_of(*layer)) ++uses[parameter->name()];
  }
  return uses;
}

std::set<std::string> tied_weights(const ModelSpec& model) {
  std::set<std::string> tied;
  for (const auto& [name, uses] : uses_of_weights(model)) {
    if (uses > 1) tied.insert(name);
  }
  return tied;
}

}  // namespace twobp
