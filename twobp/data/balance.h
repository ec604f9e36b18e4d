// What the samples of a dataset cost (Dataset::cost), and how they form batches. The results depend on the costs alone.
#pragma once

#include <cstdint>
#include <vector>

#include "twobp/data/data.h"

namespace twobp {

// The samples of a full batch in the balanced_order of their costs.
std::vector<int64_t> balanced_samples(const Dataset& dataset, const std::vector<int64_t>& samples, int64_t replicas,
                                      int64_t micro_batches, int64_t micro_batch_size);

// The mean cost of all samples. 0 if all cost the same.
double mean_cost(const Dataset& dataset);

// What the samples of each micro-batch cost in the mean, over `mean` (mean_cost). The number of samples must be a
// multiple of micro_batch_size.
std::vector<double> batch_costs(const Dataset& dataset, const std::vector<int64_t>& samples, int64_t micro_batch_size,
                                double mean);

// The costs of all samples relative to their mean, cheapest first: the means of 64 equal parts of the samples. Empty if
// all cost the same.
std::vector<double> relative_costs(const Dataset& dataset);

// The `count` samples whose costs are nearest to the mean, in order; at most dataset.size(). The first ones if all cost
// the same.
std::vector<int64_t> typical_samples(const Dataset& dataset, int64_t count);

// The sample that costs most; the first of several. The dataset must have one.
int64_t costliest_sample(const Dataset& dataset);

}  // namespace twobp
