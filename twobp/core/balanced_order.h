// Distributes samples of unequal cost, such as packed documents, over micro-batches and replicas.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace twobp {

// Returns an order of a full batch's samples, as indices into `costs`: the samples of the first replica's first
// micro-batch, then those of its next ones, then those of the next replica. All micro-batches cost about the same, and
// so do all replicas. Within a replica, the remaining differences rise and then fall from micro-batch to micro-batch.
// So neighbours, which ranks compute at the same time, cost about the same, and the pipeline fills and drains with the
// cheapest. If all samples cost the same, their order stays. The number of costs must be replicas x micro_batches x
// micro_batch_size.
std::vector<size_t> balanced_order(const std::vector<int64_t>& costs, int64_t replicas, int64_t micro_batches,
                                   int64_t micro_batch_size);

// The means of so many equal parts of a list, each value counting as an equal length of it. The mean of the whole
// stays.
std::vector<double> means_of_parts(const std::vector<double>& values, size_t parts);

}  // namespace twobp
