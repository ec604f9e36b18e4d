// Layers to stages: contiguous, by measured cost or by hand.
#pragma once

#include <string>
#include <vector>

namespace twobp {

// Bytes (or any unit) that a split has to keep within, per rank.
struct PartitionBytes {
  std::vector<double> fixed;   // by layer: parameters, gradients, optimizer state
  std::vector<double> held;    // by layer: activations of one micro-batch
  std::vector<int> in_flight;  // by stage: micro-batches it holds at most; empty: 1 each
  std::vector<double> caps;    // by rank; empty: no caps, whatever else is said
};

// The number of layers of each stage such that the slowest stage is as fast as possible (optimal for
// contiguous splits; among equals, the one whose later stages are lighter). Every stage gets at least one
// layer. Throws Error if there are more stages than layers.
std::vector<int> balanced_split(const std::vector<double>& layer_seconds, int stages);

// The same for stages on the ranks that `rank_of_stage` says: the busiest rank as fast as possible, then the
// slowest stage, then stages of like length (the least sum of squares). Optimal, by dynamic programming, for
// one stage a rank (there as above) and for a V (rank r has stages r and 2N - 1 - r) while N x layers^2 is
// at most 50 million; everything else, looped placements among it, is by local search from the split of the
// slowest stage: never worse than that one, often optimal, not proven so.
// Throws Error: more stages than layers; sizes that do not fit; costs that are negative or not finite; caps
// that no split (for local search: none that was found) keeps, naming the smallest cap for all ranks that
// would do.
std::vector<int> balanced_split(const std::vector<double>& layer_seconds,
                                const std::vector<int>& rank_of_stage, const PartitionBytes& bytes = {});

// The split whose fullest rank holds the fewest bytes, by the same methods; `caps` play no part.
std::vector<int> lightest_split(const PartitionBytes& bytes, const std::vector<int>& rank_of_stage);

// For one stage a rank, as many as `in_flight` has: of the splits whose slowest stage is at most `slack`
// (0.02: 2 %) slower than balanced_split's, the one whose fullest rank holds the fewest bytes, and of
// these the fastest; `caps` play no part. What is faster by less than measurements are off by is not worth
// memory, and would come out differently each time.
std::vector<int> balanced_light_split(const std::vector<double>& layer_seconds, const PartitionBytes& bytes,
                                      double slack);

// How unequal a split stays: the slowest stage's seconds over the mean of all.
double imbalance(const std::vector<double>& stage_seconds);

// Throws Error unless `split` has `stages` counts >= 1 that sum to `layers`.
void check_split(const std::vector<int>& split, int layers, int stages);

}  // namespace twobp
