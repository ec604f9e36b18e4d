// Each sample and field has its own generator, started from (seed, field, index).
#include "twobp/data/synthetic_dataset.h"

#include <functional>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/core/random.h"

namespace twobp {
namespace {

using Indices = std::vector<int64_t>;

class SyntheticDataset : public Dataset {
 public:
  SyntheticDataset(int64_t samples, std::function<Fields(const Indices&)> make)
      : samples_(samples), make_(std::move(make)) {}
  int64_t size() const override { return samples_; }
  Fields read(const Indices& indices, int64_t /*epoch*/) const override {
    for (const int64_t index : indices) {
      TWOBP_CHECK(index >= 0 && index < samples_, "synthetic data: no sample ", index, ", there are ", samples_, ".");
    }
    return make_(indices);
  }

 private:
  int64_t samples_;
  std::function<Fields(const Indices&)> make_;
};

// Calls fill(generator, numbers of the sample) for the samples of a field, whose first dimension they are. `stream`
// distinguishes the fields.
template <typename Number, typename Fill>
at::Tensor filled(const Indices& indices, std::vector<int64_t> sizes, uint64_t seed, uint64_t stream, Fill fill) {
  sizes.insert(sizes.begin(), static_cast<int64_t>(indices.size()));
  at::Tensor field = at::empty(sizes, c10::CppTypeToScalarType<Number>::value);
  const int64_t count = indices.empty() ? 0 : field.numel() / sizes[0];  // of a sample
  for (size_t b = 0; b < indices.size(); ++b) {
    SplitMix64 generator(mix_bits(mix_bits(seed, stream), static_cast<uint64_t>(indices[b])));
    fill(generator, field.data_ptr<Number>() + static_cast<int64_t>(b) * count, count);
  }
  return field;
}

int64_t below(SplitMix64& generator, int64_t most) {
  return static_cast<int64_t>(bounded(generator, static_cast<uint64_t>(most)));
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

std::shared_ptr<Dataset> synthetic_tokens(int64_t samples, int64_t sequence, int64_t vocab, uint64_t seed) {
  return std::make_shared<SyntheticDataset>(samples, [=](const Indices& indices) -> Fields {
    const auto make = [&](uint64_t stream) {
      return filled<int64_t>(indices, {sequence}, seed, stream, [&](SplitMix64& generator, int64_t* to, int64_t count) {
        for (int64_t t = 0; t < count; ++t) to[t] = below(generator, vocab);
      });
    };
    return {{"input_ids", make(0)}, {"labels", make(1)}};
  });
}

std::shared_ptr<Dataset> synthetic_vectors(int64_t samples, int64_t sequence, int64_t dim, uint64_t seed) {
  return std::make_shared<SyntheticDataset>(samples, [=](const Indices& indices) -> Fields {
    const auto make = [&](uint64_t stream) {
      return filled<float>(indices, {sequence, dim}, seed, stream, fill_uniform);
    };
    return {{"input", make(0)}, {"target", make(1)}};
  });
}

std::shared_ptr<Dataset> synthetic_images(int64_t samples, int64_t channels, int64_t size, int64_t classes,
                                          uint64_t seed) {
  return std::make_shared<SyntheticDataset>(samples, [=](const Indices& indices) -> Fields {
    at::Tensor labels = at::empty({static_cast<int64_t>(indices.size())}, at::kLong);
    int64_t* label = labels.data_ptr<int64_t>();
    at::Tensor images = filled<float>(indices, {channels, size, size}, seed, /*stream=*/0,
                                      [&](SplitMix64& generator, float* to, int64_t count) {
                                        fill_uniform(generator, to, count);
                                        *label++ = below(generator, classes);
                                      });
    return {{"pixel_values", std::move(images)}, {"labels", std::move(labels)}};
  });
}

}  // namespace twobp
