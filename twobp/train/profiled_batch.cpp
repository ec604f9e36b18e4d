#include "twobp/train/profiled_batch.h"

#include <vector>

#include "twobp/data/balance.h"

namespace twobp {

ProfiledBatch profiled_batch(const Dataset& data, int64_t size) {
  const std::vector<int64_t> typical = typical_samples(data, size);
  ProfiledBatch batch(data.read(typical, 0));
  const double mean = mean_cost(data);
  if (mean == 0) return batch;
  const auto cost_of = [&](const std::vector<int64_t>& samples) {
    double sum = 0;
    for (const int64_t sample : samples) sum += static_cast<double>(data.cost(sample));
    return sum / static_cast<double>(samples.size()) / mean;
  };
  const std::vector<int64_t> costliest = costliest_samples(data, size);
  batch.cost = cost_of(typical);
  batch.costly_cost = cost_of(costliest);
  // Otherwise micro-batches of this size hardly differ.
  if (batch.costly_cost > batch.cost) batch.costly = data.read(costliest, 0);
  return batch;
}

}  // namespace twobp
