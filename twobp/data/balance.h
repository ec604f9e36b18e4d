// Samples that cost unequally, such as packed documents: which of a batch share a micro-batch and a replica,
// and which are like most. Depends on the costs alone (Dataset::cost).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "twobp/data/data.h"

namespace twobp {

// An order of a full batch's samples, by their index in `costs`: those of the first replica's first
// micro-batch, then those of its next ones, then those of the next replica. All micro-batches cost about the
// same, and so do all replicas. What is left of their differences rises and then falls over the micro-batches
// of a replica: neighbours, which ranks compute at the same time, cost about the same, and a pipeline fills
// and drains with the cheapest. The order stays if all samples cost the same. The number of costs must be
// replicas x micro_batches x micro_batch_size.
std::vector<size_t> level_order(const std::vector<int64_t>& costs, int64_t replicas, int64_t micro_batches,
                                int64_t micro_batch_size);

// The samples of a full batch in level_order of what they cost.
std::vector<int64_t> in_level_order(const Dataset& dataset, const std::vector<int64_t>& samples,
                                    int64_t replicas, int64_t micro_batches, int64_t micro_batch_size);

// The `count` samples whose costs are nearest to the mean, in order; at most dataset.size(). The first ones
// if all cost the same.
std::vector<int64_t> typical_samples(const Dataset& dataset, int64_t count);

}  // namespace twobp
