#include "twobp/train/profiled_batch.h"

#include <vector>

#include "twobp/data/balance.h"

namespace twobp {

ProfiledBatch profiled_batch(const Dataset& data, int64_t size) {
  const std::vector<int64_t> typical = typical_samples(data, size);
  ProfiledBatch batch(data.read(typical, 0));
  const double mean = mean_cost(data);
  if (mean == 0) return batch;
  batch.cost = 0;
  for (const int64_t sample : typical) {
    batch.cost += static_cast<double>(data.cost(sample)) / mean / static_cast<double>(typical.size());
  }
  const int64_t costliest = costliest_sample(data);
  batch.costly_cost = static_cast<double>(data.cost(costliest)) / mean;
  if (batch.costly_cost > batch.cost)
    batch.costly = data.read(std::vector<int64_t>(typical.size(), costliest), 0);
  return batch;
}

}  // namespace twobp
