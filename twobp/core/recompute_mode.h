// What a layer recomputes instead of keeping it. nn/layers/recompute.h does it, and plan/cost_model.h foresees its
// cost.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace twobp {

enum class Recompute : uint8_t { kNone, kActivations, kDerivatives, kBoth };
std::vector<std::string> recompute_names();
std::string_view recompute_name(Recompute mode);
// Throws Error if the name is unknown.
Recompute parse_recompute(std::string_view name);

inline bool recomputes_activations(Recompute mode) {
  return mode == Recompute::kActivations || mode == Recompute::kBoth;
}
inline bool recomputes_derivatives(Recompute mode) {
  return mode == Recompute::kDerivatives || mode == Recompute::kBoth;
}

}  // namespace twobp
