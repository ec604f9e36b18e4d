// Assigns layers to stages: contiguous, by measured cost or by hand.
#pragma once

#include <string>
#include <vector>

namespace twobp {

// Bytes (or any unit) that a split must keep within, by rank.
struct PartitionBytes {
  std::vector<double> fixed;   // by layer: parameters, gradients, optimizer state
  std::vector<double> held;    // by layer: activations of one micro-batch
  std::vector<int> in_flight;  // by stage: most micro-batches that it holds; empty: 1 each
  std::vector<double> caps;    // by rank; empty: no caps, whatever the other fields say
};

// The number of layers of each stage that makes the slowest stage as fast as possible (optimal for contiguous splits;
// among equals, the one with lighter later stages). Every stage gets at least one layer. Throws Error if there are more
// stages than layers.
std::vector<int> balanced_split(const std::vector<double>& layer_seconds, int stages);

// The same for stages that `rank_of_stage` places on ranks. First the busiest rank is as fast as possible, then the
// slowest stage, then stages are of similar length (the least sum of squares). It is optimal, by dynamic programming,
// for one stage on each rank (there as above), and for a V (rank r has stages r and 2N - 1 - r) if N x layers^2 is at
// most 50 million. Other placements, such as looped ones, use local search from the split of the slowest stage. Its
// result is never worse than that split and often optimal, but not proven so.
// Throws Error for more stages than layers, sizes that do not fit, costs that are negative or not finite, and caps that
// no split (for local search: none that was found) keeps. That error names the smallest cap for all ranks that would
// suffice.
std::vector<int> balanced_split(const std::vector<double>& layer_seconds, const std::vector<int>& rank_of_stage,
                                const PartitionBytes& bytes = {});

// The split whose fullest rank holds the fewest bytes, by the same methods. `caps` are ignored.
std::vector<int> lightest_split(const PartitionBytes& bytes, const std::vector<int>& rank_of_stage);

// For one stage on each rank; `in_flight` gives their number. Considers the splits whose slowest stage is at most
// `slack` (0.02: 2 %) slower than that of balanced_split. Returns the one whose fullest rank holds the fewest bytes,
// and of these the fastest. `caps` are ignored. A gain below the measurement error is not worth memory, and would
// differ from run to run.
std::vector<int> balanced_light_split(const std::vector<double>& layer_seconds, const PartitionBytes& bytes,
                                      double slack);

// The imbalance of a split: the slowest stage's seconds over the mean of all.
double imbalance(const std::vector<double>& stage_seconds);

// Throws Error if there are more stages than layers. It says what would fit.
void check_stages(size_t layers, const std::vector<int>& rank_of_stage);

// Throws Error unless `split` has `stages` counts >= 1 that sum to `layers`.
void check_split(const std::vector<int>& split, int layers, int stages);

}  // namespace twobp
