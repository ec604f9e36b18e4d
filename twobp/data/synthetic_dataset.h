// Seeded random data for benchmarks. A sample depends on the seed and its index alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "twobp/data/data.h"

namespace twobp {

// The samples of a configuration's data.synthetic.
inline constexpr int64_t kSyntheticSamples = 1024;

// `input_ids` and `labels` (B, S) int64, uniform in [0, vocab); every label is counted.
class SyntheticTokens : public Dataset {
 public:
  SyntheticTokens(int64_t samples, int64_t sequence, int64_t vocab, uint64_t seed);
  int64_t size() const override { return samples_; }
  Fields read(const std::vector<int64_t>& indices, int64_t epoch) const override;

 private:
  int64_t samples_;
  int64_t sequence_;
  int64_t vocab_;
  uint64_t seed_;
};

// `input` and `target` (B, S, D) float32, uniform with mean 0 and variance 1.
class SyntheticVectors : public Dataset {
 public:
  SyntheticVectors(int64_t samples, int64_t sequence, int64_t dim, uint64_t seed);
  int64_t size() const override { return samples_; }
  Fields read(const std::vector<int64_t>& indices, int64_t epoch) const override;

 private:
  int64_t samples_;
  int64_t sequence_;
  int64_t dim_;
  uint64_t seed_;
};

// `pixel_values` (B, C, size, size) float32, uniform with mean 0 and variance 1, and `labels` (B) int64, uniform in [0,
// classes).
class SyntheticImages : public Dataset {
 public:
  SyntheticImages(int64_t samples, int64_t channels, int64_t size, int64_t classes, uint64_t seed);
  int64_t size() const override { return samples_; }
  Fields read(const std::vector<int64_t>& indices, int64_t epoch) const override;

 private:
  int64_t samples_;
  int64_t channels_;
  int64_t image_size_;
  int64_t classes_;
  uint64_t seed_;
};

}  // namespace twobp
