// Text from a language model: one thread of control, all its cores, a key-value cache per attention layer.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "twobp/models/model.h"

namespace twobp {

struct SamplingOptions {
  double temperature = 1;  // 0: always the likeliest token
  double top_p = 1;  // of the likeliest tokens, the fewest whose probabilities reach this (arXiv 1904.09751)
  uint64_t seed = 1;
};

// A token drawn from logits (vocab). Ties go to the lower id.
int64_t sample(const at::Tensor& logits, const SamplingOptions& options, std::mt19937_64& random);

class Generator {
 public:
  // Makes all layers of `model` on the calling thread, which alone may use the generator. Weights are the
  // initial ones until `parameters` are given values.
  explicit Generator(const ModelSpec& model);

  // Every weight once, in model order.
  const std::vector<Parameter*>& parameters() const { return parameters_; }

  // Calls on_token with each of `count` new tokens; it returns false to stop. Throws Error: an empty prompt,
  // a token id outside the vocabulary.
  void generate(const std::vector<int64_t>& prompt, int64_t count, const SamplingOptions& options,
                const std::function<bool(int64_t token)>& on_token);

 private:
  // The logits (vocab) of the token after `tokens`, of which the first `past` are in the caches.
  at::Tensor next_logits(const std::vector<int64_t>& tokens, int64_t past, int64_t capacity);

  std::vector<std::unique_ptr<Layer>> layers_;
  std::vector<Saved> saved_;  // by layer: the caches
  std::vector<Parameter*> parameters_;
};

}  // namespace twobp
