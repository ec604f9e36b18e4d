// The frequencies of rotary position embedding (RoFormer, arXiv 2104.09864), and how models stretch them for
// sequences longer than they were first trained on.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/ATen.h>

namespace twobp {

enum class RopeScaling : uint8_t {
  kNone,
  kLinear,  // all positions divided by `factor` (arXiv 2306.15595)
  kLlama3,  // long wavelengths by `factor`, short ones not at all, between them by a mix (LLaMa 3.1)
};

struct RopeSettings {
  double theta = 10000;  // pair i of a head turns by theta^(-2 i / head_dim) a position
  RopeScaling scaling = RopeScaling::kNone;
  double factor = 1;
  // kLlama3: wavelengths above original_positions / low_freq_factor are long, those below
  // original_positions / high_freq_factor short.
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  double original_positions = 8192;
};

// "none", "linear", "llama3", as model.rope_scaling has them. Throws Error for others, listing these.
RopeScaling parse_rope_scaling(std::string_view name);
const std::vector<std::string>& rope_scaling_names();

// Radians a position, float64 (head_dim / 2). Throws Error: head_dim odd, a factor out of range.
at::Tensor rope_frequencies(const RopeSettings& settings, int64_t head_dim);

}  // namespace twobp
