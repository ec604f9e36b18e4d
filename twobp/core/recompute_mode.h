// What a layer recomputes instead of keeping it. models/recompute/recompute_layer.h does it, and plan/cost_model.h
// foresees its cost.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "twobp/core/text.h"

namespace twobp {

enum class Recompute : uint8_t { kNone, kActivations, kDerivatives, kBoth };
inline std::vector<std::string> recompute_names() {
  return {"none", "activations", "derivatives", "both"};
}
inline std::string_view recompute_name(Recompute mode) {
  static const std::vector<std::string> names = recompute_names();
  return names[static_cast<size_t>(mode)];
}
// Throws Error if the name is unknown.
inline Recompute parse_recompute(std::string_view name) {
  return static_cast<Recompute>(index_of_name("recomputation", name, recompute_names()));
}

inline bool recomputes_activations(Recompute mode) {
  return mode == Recompute::kActivations || mode == Recompute::kBoth;
}
inline bool recomputes_derivatives(Recompute mode) {
  return mode == Recompute::kDerivatives || mode == Recompute::kBoth;
}

}  // namespace twobp
