// Layers to stages: contiguous, by measured cost or by hand.
#pragma once

#include <string>
#include <vector>

namespace twobp {

// The number of layers of each stage such that the slowest stage is as fast as possible (optimal for
// contiguous splits; among equals, the one whose later stages are lighter). Every stage gets at least one
// layer. Throws Error if there are more stages than layers.
std::vector<int> balanced_split(const std::vector<double>& layer_seconds, int stages);

// How unequal a split stays: the slowest stage's seconds over the mean of all.
double imbalance(const std::vector<double>& stage_seconds);

// Throws Error unless `split` has `stages` counts >= 1 that sum to `layers`.
void check_split(const std::vector<int>& split, int layers, int stages);

}  // namespace twobp
