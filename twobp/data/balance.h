// Distributes samples of unequal cost, such as packed documents, over micro-batches and replicas, and finds
// typical samples. The results depend on the costs alone (Dataset::cost).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "twobp/data/data.h"

namespace twobp {

// Returns an order of a full batch's samples, as indices into `costs`: the samples of the first replica's
// first micro-batch, then those of its next ones, then those of the next replica. All micro-batches cost
// about the same, and so do all replicas. Within a replica, the remaining differences rise and then fall from
// micro-batch to micro-batch. So neighbours, which ranks compute at the same time, cost about the same, and
// the pipeline fills and drains with the cheapest. If all samples cost the same, their order stays. The
// number of costs must be replicas x micro_batches x micro_batch_size.
std::vector<size_t> balanced_order(const std::vector<int64_t>& costs, int64_t replicas, int64_t micro_batches,
                                   int64_t micro_batch_size);

// The samples of a full batch in the balanced_order of their costs.
std::vector<int64_t> balanced_samples(const Dataset& dataset, const std::vector<int64_t>& samples,
                                      int64_t replicas, int64_t micro_batches, int64_t micro_batch_size);

// The `count` samples whose costs are nearest to the mean, in order; at most dataset.size(). The first ones
// if all cost the same.
std::vector<int64_t> typical_samples(const Dataset& dataset, int64_t count);

}  // namespace twobp
