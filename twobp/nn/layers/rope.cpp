#include "twobp/nn/layers/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "twobp/core/check.h"
#include "twobp/core/text.h"

namespace twobp {
namespace {

// As in _compute_llama3_parameters of transformers' modeling_rope_utils.py, which follows Meta's llama-models.
double llama3_frequency(double frequency, const RopeSettings& rope) {
  const double wavelength = 2 * std::numbers::pi / frequency;
  if (wavelength > rope.original_positions / rope.low_freq_factor) return frequency / rope.factor;
  if (wavelength < rope.original_positions / rope.high_freq_factor) return frequency;
  const double smooth =
      (rope.original_positions / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
  return (1 - smooth) * frequency / rope.factor + smooth * frequency;
}

// Pair by pair, the part of a frequency that is not stretched, as in _compute_yarn_parameters of modeling_rope_utils.py
// (arXiv 2309.00071, section 3.2).
double yarn_unstretched(int64_t pair, int64_t dims, const RopeSettings& rope) {
  // The pair, as a real number, that turns this often within the original positions.
  const auto pair_of = [&](double turns) {
    return static_cast<double>(dims) * std::log(rope.original_positions / (turns * 2 * std::numbers::pi)) /
           (2 * std::log(rope.theta));
  };
  const double first = pair_of(rope.beta_fast);
  const double last = pair_of(rope.beta_slow);
  const double low = std::max(rope.whole_pairs ? std::floor(first) : first, 0.0);
  double high = std::min(rope.whole_pairs ? std::ceil(last) : last, static_cast<double>(dims - 1));
  if (low == high) high += 0.001;
  return 1 - std::clamp((static_cast<double>(pair) - low) / (high - low), 0.0, 1.0);
}

// Of Dynamic NTK, as in _compute_dynamic_ntk_parameters.
double dynamic_theta(const RopeSettings& rope, int64_t dims, int64_t length) {
  const double positions = std::max(static_cast<double>(length), rope.original_positions);
  const double stretched = rope.factor * positions / rope.original_positions - (rope.factor - 1);
  return rope.theta * std::pow(stretched, static_cast<double>(dims) / static_cast<double>(dims - 2));
}

}  // namespace

const std::vector<std::string>& rope_scaling_names() {
  static const std::vector<std::string> names = {"none", "linear", "llama3", "yarn", "dynamic", "longrope"};
  return names;
}

RopeScaling parse_rope_scaling(std::string_view name) {
  const auto& names = rope_scaling_names();
  const auto found = std::find(names.begin(), names.end(), name);
  TWOBP_CHECK(found != names.end(), "rope scaling \"", name, "\" is not supported: supported are ", join(names));
  return static_cast<RopeScaling>(found - names.begin());
}

int64_t RopeSettings::beyond(int64_t length) const {
  if (static_cast<double>(length) <= original_positions) return 0;
  if (scaling == RopeScaling::kDynamic) return length;
  return scaling == RopeScaling::kLongrope ? 1 : 0;
}

double rope_magnitude(const RopeSettings& rope) {
  const bool longrope = rope.scaling == RopeScaling::kLongrope;
  if (rope.scaling != RopeScaling::kYarn && !longrope) return 1;
  if (rope.attention_factor > 0) return rope.attention_factor;
  if (rope.factor <= 1) return 1;
  return longrope ? std::sqrt(1 + std::log(rope.factor) / std::log(rope.original_positions))
                  : 0.1 * std::log(rope.factor) + 1;
}

at::Tensor rope_frequencies(const RopeSettings& rope, int64_t dims, int64_t length) {
  TWOBP_CHECK(dims > 0 && dims % 2 == 0, "rotary embedding needs an even head_dim, got ", dims);
  TWOBP_CHECK(rope.theta > 0 && rope.factor > 0, "rotary embedding needs a theta and a factor above 0, got ",
              rope.theta, " and ", rope.factor);
  const bool dynamic = rope.scaling == RopeScaling::kDynamic;
  TWOBP_CHECK(!dynamic || dims > 2, "dynamic rope scaling needs more than 2 features of a head, got ", dims);
  const double theta = dynamic ? dynamic_theta(rope, dims, length) : rope.theta;
  const int64_t half = dims / 2;
  const auto options = at::TensorOptions().dtype(at::kDouble);
  at::Tensor frequencies =
      at::pow(at::scalar_tensor(theta, options), at::arange(half, options).neg().div(static_cast<double>(half)));
  if (rope.scaling == RopeScaling::kLinear) frequencies.div_(rope.factor);
  double* frequency = frequencies.mutable_data_ptr<double>();
  TWOBP_CHECK(rope.original_positions > 0, "rope scaling needs original positions above 0, got ",
              rope.original_positions);
  if (rope.scaling == RopeScaling::kYarn) {
    for (int64_t i = 0; i < half; ++i) {
      const double kept = yarn_unstretched(i, dims, rope);
      frequency[i] *= kept + (1 - kept) / rope.factor;
    }
  }
  if (rope.scaling == RopeScaling::kLlama3) {
    TWOBP_CHECK(0 < rope.low_freq_factor && rope.low_freq_factor < rope.high_freq_factor,
                "llama3's rope scaling needs 0 < low_freq_factor < high_freq_factor, got ", rope.low_freq_factor,
                " and ", rope.high_freq_factor);
    for (int64_t i = 0; i < half; ++i) frequency[i] = llama3_frequency(frequency[i], rope);
  }
  if (rope.scaling == RopeScaling::kLongrope) {
    const std::vector<double>& factors = rope.beyond(length) > 0 ? rope.long_factors : rope.short_factors;
    TWOBP_CHECK(static_cast<int64_t>(factors.size()) == half, "longrope needs a factor for each of ", half,
                " pairs of features, got ", factors.size());
    for (int64_t i = 0; i < half; ++i) frequency[i] /= factors[static_cast<size_t>(i)];
  }
  return frequencies;
}

}  // namespace twobp
