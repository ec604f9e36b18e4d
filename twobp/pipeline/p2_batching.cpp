#include "twobp/pipeline/p2_batching.h"

#include "twobp/core/text.h"

namespace twobp {

std::vector<std::string> batching_names() {
  return {"loop", "concat"};
}

std::string_view batching_name(P2Batching batching) {
  static const std::vector<std::string> names = batching_names();
  return names[static_cast<size_t>(batching)];
}

P2Batching parse_batching(std::string_view name) {
  return static_cast<P2Batching>(index_of_name("p2 batching", name, batching_names()));
}

}  // namespace twobp
