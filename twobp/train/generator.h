// Generates text with a language model. There is one thread of control that uses all its cores, or a device, and a
// key-value cache per attention layer.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "twobp/models/model.h"
#include "twobp/nn/device/device.h"

namespace twobp {

struct SamplingOptions {
  double temperature = 1;  // 0: always the likeliest token
  double top_p = 1;        // samples from the fewest likeliest tokens with this probability (arXiv 1904.09751)
  uint64_t seed = 1;
};

// Draws a token from logits (vocab). Ties go to the lower id.
int64_t sample(const at::Tensor& logits, const SamplingOptions& options, std::mt19937_64& random);

class Generator {
 public:
  // Makes all layers of `model` on the calling thread. Only that thread may use the generator. Weights have their
  // initial values until `parameters` are set, on the device.
  explicit Generator(const ModelSpec& model, const Device& device = {});

  // Every weight once, in model order.
  const std::vector<Parameter*>& parameters() const { return parameters_; }

  // Calls on_token with each of `count` new tokens. on_token returns false to stop. Throws Error for an empty prompt or
  // a token id outside the vocabulary.
  void generate(const std::vector<int64_t>& prompt, int64_t count, const SamplingOptions& options,
                const std::function<bool(int64_t token)>& on_token);

 private:
  // The logits (vocab) of the token after `tokens`. The caches hold the first `past` of these.
  at::Tensor next_logits(const std::vector<int64_t>& tokens, int64_t past, int64_t capacity);

  Device device_;
  int64_t cache_until_;
  std::vector<std::unique_ptr<Layer>> layers_;
  std::vector<Saved> saved_;  // the caches, by layer
  std::vector<Parameter*> parameters_;
};

}  // namespace twobp
