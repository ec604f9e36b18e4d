// Packing of documents into samples, none of which is cut: best fit, decreasing (H. Ding et al., "Fewer Truncations
// Improve Language Modeling", arXiv 2404.10830).
#pragma once

#include <cstdint>
#include <vector>

namespace twobp {

// The documents of each sample of at most `capacity` tokens. Documents are taken from the longest on; each goes to the
// sample with the least room that it fits into. Within a sample, and by their first document,
// all are in order. Each length must be from 1 to `capacity`.
std::vector<std::vector<int64_t>> best_fit(const std::vector<int64_t>& lengths, int64_t capacity);

}  // namespace twobp
