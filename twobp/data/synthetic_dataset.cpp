// Each sample and field has its own generator, started from (seed, field, index).
#include "twobp/data/synthetic_dataset.h"

#include "twobp/core/check.h"
#include "twobp/core/random.h"

namespace twobp {
namespace {

// Calls fill(generator, position) for the samples at `indices`, each with its own generator. `stream` distinguishes the
// fields.
template <typename Fill>
void for_each_sample(const std::vector<int64_t>& indices, int64_t samples, uint64_t seed, uint64_t stream, Fill fill) {
  for (size_t b = 0; b < indices.size(); ++b) {
    TWOBP_CHECK(indices[b] >= 0 && indices[b] < samples, "synthetic data: no sample ", indices[b], ", there are ",
                samples, ".");
    SplitMix64 generator(mix_bits(mix_bits(seed, stream), static_cast<uint64_t>(indices[b])));
    fill(generator, static_cast<int64_t>(b));
  }
}

// Uniform numbers with mean 0 and variance 1.
void fill_uniform(SplitMix64& generator, float* to, int64_t count) {
  // 24 random bits as a signed integer, scaled to [-sqrt(3), sqrt(3)), which has variance 1.
  constexpr float kScale = 1.7320508F / static_cast<float>(1 << 23);
  for (int64_t i = 0; i < count; ++i) {
    to[i] = static_cast<float>(static_cast<int32_t>(generator() >> 40) - (1 << 23)) * kScale;
  }
}

}  // namespace

SyntheticTokens::SyntheticTokens(int64_t samples, int64_t sequence, int64_t vocab, uint64_t seed)
    : samples_(samples), sequence_(sequence), vocab_(vocab), seed_(seed) {}

Fields SyntheticTokens::read(const std::vector<int64_t>& indices, int64_t /*epoch*/) const {
  const auto make = [&](uint64_t stream) {
    at::Tensor ids = at::empty({static_cast<int64_t>(indices.size()), sequence_}, at::kLong);  // (B, S)
    for_each_sample(indices, samples_, seed_, stream, [&](SplitMix64& generator, int64_t b) {
      int64_t* to = ids.data_ptr<int64_t>() + b * sequence_;
      for (int64_t t = 0; t < sequence_; ++t)
        to[t] = static_cast<int64_t>(bounded(generator, static_cast<uint64_t>(vocab_)));
    });
    return ids;
  };
  return {{"input_ids", make(0)}, {"labels", make(1)}};
}

SyntheticVectors::SyntheticVectors(int64_t samples, int64_t sequence, int64_t dim, uint64_t seed)
    : samples_(samples), sequence_(sequence), dim_(dim), seed_(seed) {}

Fields SyntheticVectors::read(const std::vector<int64_t>& indices, int64_t /*epoch*/) const {
  const auto make = [&](uint64_t stream) {
    at::Tensor values = at::empty({static_cast<int64_t>(indices.size()), sequence_, dim_}, at::kFloat);  // (B, S, D)
    const int64_t per_sample = sequence_ * dim_;
    for_each_sample(indices, samples_, seed_, stream, [&](SplitMix64& generator, int64_t b) {
      fill_uniform(generator, values.data_ptr<float>() + b * per_sample, per_sample);
    });
    return values;
  };
  return {{"input", make(0)}, {"target", make(1)}};
}

SyntheticImages::SyntheticImages(int64_t samples, int64_t channels, int64_t size, int64_t classes, uint64_t seed)
    : samples_(samples), channels_(channels), image_size_(size), classes_(classes), seed_(seed) {}

Fields SyntheticImages::read(const std::vector<int64_t>& indices, int64_t /*epoch*/) const {
  const auto count = static_cast<int64_t>(indices.size());
  at::Tensor images = at::empty({count, channels_, image_size_, image_size_}, at::kFloat);  // (B, C, H, W)
  at::Tensor labels = at::empty({count}, at::kLong);
  const int64_t per_sample = channels_ * image_size_ * image_size_;
  for_each_sample(indices, samples_, seed_, /*stream=*/0, [&](SplitMix64& generator, int64_t b) {
    fill_uniform(generator, images.data_ptr<float>() + b * per_sample, per_sample);
    labels.data_ptr<int64_t>()[b] = static_cast<int64_t>(bounded(generator, static_cast<uint64_t>(classes_)));
  });
  return {{"pixel_values", std::move(images)}, {"labels", std::move(labels)}};
}

}  // namespace twobp
