// The frequencies of rotary position embedding (RoFormer, arXiv 2104.09864), and how models stretch them for
// sequences longer than those of their first training.
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
  kLlama3,  // long wavelengths by `factor`, short ones not at all, a mix in between (LLaMa 3.1)
};

struct RopeSettings {
  double theta = 10000;  // pair i of a head turns by theta^(-2 i / head_dim) per position
  RopeScaling scaling = RopeScaling::kNone;
  double factor = 1;
  // kLlama3: wavelengths above original_positions / low_freq_factor are long; those below original_positions
  // / high_freq_factor are short.
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  double original_positions = 8192;
};

// The values of model.rope_scaling: "none", "linear", "llama3". Throws Error that lists them for other names.
RopeScaling parse_rope_scaling(std::string_view name);
const std::vector<std::string>& rope_scaling_names();

// Radians per position, float64 (head_dim / 2). Throws Error if head_dim is odd or a factor is out of range.
at::Tensor rope_frequencies(const RopeSettings& settings, int64_t head_dim);

}  // namespace twobp
