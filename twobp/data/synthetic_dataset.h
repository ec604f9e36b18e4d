// Seeded random data for benchmarks. A sample depends on the seed and its index alone.
#pragma once

#include <cstdint>
#include <memory>

#include "twobp/data/data.h"

namespace twobp {

// The samples of a configuration's data.synthetic.
inline constexpr int64_t kSyntheticSamples = 1024;

// `input_ids` and `labels` (B, S) int64, uniform in [0, vocab); every label is counted.
std::shared_ptr<Dataset> synthetic_tokens(int64_t samples, int64_t sequence, int64_t vocab, uint64_t seed);

// `input` and `target` (B, S, D) float32, uniform with mean 0 and variance 1.
std::shared_ptr<Dataset> synthetic_vectors(int64_t samples, int64_t sequence, int64_t dim, uint64_t seed);

// `pixel_values` (B, C, size, size) float32, uniform with mean 0 and variance 1, and `labels` (B) int64, uniform in [0,
// classes).
std::shared_ptr<Dataset> synthetic_images(int64_t samples, int64_t channels, int64_t size, int64_t classes,
                                          uint64_t seed);

}  // namespace twobp
