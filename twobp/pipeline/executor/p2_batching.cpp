#include "twobp/pipeline/executor/p2_batching.h"

#include "twobp/core/check.h"
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
  const auto names = batching_names();
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] == name) return static_cast<P2Batching>(i);
  }
  fail("unknown p2 batching '", name, "', did you mean '", nearest(name, names), "'? (known: ", join(names),
       ")");
}

}  // namespace twobp
