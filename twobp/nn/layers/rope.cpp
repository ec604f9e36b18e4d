#include "twobp/nn/layers/rope.h"

#include <algorithm>
#include <numbers>

#include "twobp/core/check.h"
#include "twobp/core/text.h"

namespace twobp {
namespace {

// As in _compute_llama3_parameters of transformers' modeling_rope_utils.py, which follows Meta's
// llama-models.
double llama3_frequency(double frequency, const RopeSettings& rope) {
  const double wavelength = 2 * std::numbers::pi / frequency;
  if (wavelength > rope.original_positions / rope.low_freq_factor) return frequency / rope.factor;
  if (wavelength < rope.original_positions / rope.high_freq_factor) return frequency;
  const double smooth = (rope.original_positions / wavelength - rope.low_freq_factor) /
                        (rope.high_freq_factor - rope.low_freq_factor);
  return (1 - smooth) * frequency / rope.factor + smooth * frequency;
}

}  // namespace

const std::vector<std::string>& rope_scaling_names() {
  static const std::vector<std::string> names = {"none", "linear", "llama3"};
  return names;
}

RopeScaling parse_rope_scaling(std::string_view name) {
  const auto& names = rope_scaling_names();
  const auto found = std::find(names.begin(), names.end(), name);
  TWOBP_CHECK(found != names.end(), "rope scaling \"", name, "\" is not supported: supported are ",
              join(names));
  return static_cast<RopeScaling>(found - names.begin());
}

at::Tensor rope_frequencies(const RopeSettings& rope, int64_t head_dim) {
  TWOBP_CHECK(head_dim > 0 && head_dim % 2 == 0, "rotary embedding needs an even head_dim, got ", head_dim);
  TWOBP_CHECK(rope.theta > 0 && rope.factor > 0, "rotary embedding needs a theta and a factor above 0, got ",
              rope.theta, " and ", rope.factor);
  const int64_t half = head_dim / 2;
  const auto options = at::TensorOptions().dtype(at::kDouble);
  at::Tensor frequencies = at::pow(at::scalar_tensor(rope.theta, options),
                                   at::arange(half, options).neg().div(static_cast<double>(half)));
  if (rope.scaling == RopeScaling::kLinear) frequencies.div_(rope.factor);
  if (rope.scaling == RopeScaling::kLlama3) {
    TWOBP_CHECK(0 < rope.low_freq_factor && rope.low_freq_factor < rope.high_freq_factor,
                "llama3's rope scaling needs 0 < low_freq_factor < high_freq_factor, got ",
                rope.low_freq_factor, " and ", rope.high_freq_factor);
    TWOBP_CHECK(rope.original_positions > 0, "llama3's rope scaling needs original positions above 0, got ",
                rope.original_positions);
    double* frequency = frequencies.mutable_data_ptr<double>();
    for (int64_t i = 0; i < half; ++i) frequency[i] = llama3_frequency(frequency[i], rope);
  }
  return frequencies;
}

}  // namespace twobp
