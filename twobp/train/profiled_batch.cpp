#include "twobp/train/profiled_batch.h"

#include <vector>

#include "twobp/data/balance.h"

namespace twobp {

ProfiledBatch profiled_batch(const Dataset& data, int64_t size) {
  const std::vector<int64_t> typical = typical_samples(data, size);
  ProfiledBatch batch(data.read(typical, 0));
  const double mean = mean_cost(data);
  if (mean == 0) return batch;
  const auto count = static_cast<int64_t>(typical.size());
  const std::vector<int64_t> costliest(typical.size(), costliest_sample(data));
  batch.cost = batch_costs(data, typical, count, mean).front();
  batch.costly_cost = batch_costs(data, costliest, count, mean).front();
  if (batch.costly_cost > batch.cost) batch.costly = data.read(costliest, 0);
  return batch;
}

}  // namespace twobp
