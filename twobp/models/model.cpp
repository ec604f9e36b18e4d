#include "twobp/models/model.h"

namespace twobp {

std::set<std::string> tied_weights(const ModelSpec& model) {
  std::set<std::string> known;
  std::set<std::string> tied;
  for (const LayerSpec& spec : model.layers) {
    const auto layer = spec.make();
    for (const Parameter* parameter : parameters_of(*layer)) {
      if (!known.insert(parameter->name()).second) tied.insert(parameter->name());
    }
  }
  return tied;
}

}  // namespace twobp
