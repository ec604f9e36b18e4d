// Micro-batches of samples that cost unequally, as a plan expects them.
#pragma once

#include <vector>

#include "twobp/schedule/simulate/stage_cost.h"

namespace twobp {

// The sizes of a batch.
struct BatchShape {
  int replicas = 1;
  int micro_batches = 1;  // of each replica
  int micro_batch_size = 1;
};

// The costs of a typical batch's micro-batches, those of the first replica, over the mean cost. The batch has
// samples from all parts of `sample_costs` (CostModel::sample_costs) alike, in the order of training
// (balanced_order). Empty if `sample_costs` is: all cost the same.
std::vector<double> typical_batch(const std::vector<double>& sample_costs, const BatchShape& shape);

// The stages' costs for these micro-batches, as rows for `simulate` (costs_of_micro_batches). `costs` itself
// if all samples cost the same.
std::vector<StageCost> costs_of_batch(const std::vector<StageCost>& costs,
                                      const std::vector<double>& sample_costs, const BatchShape& shape);

}  // namespace twobp
