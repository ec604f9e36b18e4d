// The frequencies of rotary position embedding (RoFormer, arXiv 2104.09864), and how models stretch them for sequences
// longer than those of their first training.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/ATen.h>

namespace twobp {

enum class RopeScaling : uint8_t {
  kNone,
  kLinear,    // all positions divided by `factor` (arXiv 2306.15595)
  kLlama3,    // long wavelengths by `factor`, short ones not at all, a mix in between (LLaMa 3.1)
  kYarn,      // the same, mixed by the number of turns in the original positions, and longer queries and keys (arXiv
              // 2309.00071)
  kDynamic,   // theta grows with a sequence's length beyond the original positions (Dynamic NTK, ibid.)
  kLongrope,  // each pair divided by a factor of its own, for sequences beyond the original positions another (arXiv
              // 2402.13753), and longer queries and keys
};

struct RopeSettings {
  double theta = 10000;  // pair i of a head turns by theta^(-2 i / head_dim) per position
  RopeScaling scaling = RopeScaling::kNone;
  double factor = 1;
  // kLlama3: wavelengths above original_positions / low_freq_factor are long; those below original_positions /
  // high_freq_factor are short.
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  double original_positions = 8192;  // kLlama3, kYarn, kDynamic, kLongrope
  // kYarn: pairs that turn more often than beta_fast within the original positions are not stretched, and those that
  // turn less often than beta_slow are stretched by `factor`.
  double beta_fast = 32;
  double beta_slow = 1;
  bool whole_pairs = true;  // kYarn: whether the pairs between which it changes are rounded to whole ones
  // kYarn, kLongrope: factor of queries and keys. 0: with kYarn 0.1 ln(factor) + 1, with kLongrope
  // sqrt(1 + ln(factor) / ln(original_positions)).
  double attention_factor = 0;
  std::vector<double> short_factors{};  // kLongrope: (dims / 2), up to the original positions
  std::vector<double> long_factors{};   // kLongrope: (dims / 2), beyond them

  // Sequences for which this is equal have the same frequencies. It is 0 if they do not follow from the length: with
  // kDynamic and kLongrope they do beyond the original positions.
  int64_t beyond(int64_t length) const;
};

// The values of model.rope_scaling: "none", "linear", "llama3", "yarn", "dynamic", "longrope". Throws Error that lists
// them for other names.
RopeScaling parse_rope_scaling(std::string_view name);
const std::vector<std::string>& rope_scaling_names();

// Radians per position, float64 (dims / 2), of a sequence of `length` positions, see beyond(). `dims` are the features
// of a head that turn. Throws Error if dims is odd, a factor is out of range, or kLongrope has another number of
// factors.
at::Tensor rope_frequencies(const RopeSettings& settings, int64_t dims, int64_t length = 0);

// The factor of cos and sin: 1, or the attention factor.
double rope_magnitude(const RopeSettings& settings);

}  // namespace twobp
