#include "twobp/core/recompute_mode.h"

#include "twobp/core/text.h"

namespace twobp {

std::vector<std::string> recompute_names() {
  return {"none", "activations", "derivatives", "both"};
}

std::string_view recompute_name(Recompute mode) {
  static const std::vector<std::string> names = recompute_names();
  return names[static_cast<size_t>(mode)];
}

Recompute parse_recompute(std::string_view name) {
  return static_cast<Recompute>(index_of_name("recomputation", name, recompute_names()));
}

}  // namespace twobp
