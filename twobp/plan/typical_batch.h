// Micro-batches of samples that cost unequally, as a plan expects them.
#pragma once

#include <vector>

namespace twobp {

// The sizes of a batch.
struct BatchShape {
  int replicas = 1;
  int micro_batches = 1;  // of each replica
  int micro_batch_size = 1;
};

// The costs of a typical batch's micro-batches, those of the first replica, over the mean cost. The batch has samples
// from all parts of `sample_costs` (CostModel::sample_costs) alike, in the order of training (balanced_order). Empty if
// `sample_costs` is: all cost the same.
std::vector<double> typical_batch(const std::vector<double>& sample_costs, const BatchShape& shape);

}  // namespace twobp
