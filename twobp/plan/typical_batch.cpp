#include "twobp/plan/typical_batch.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "twobp/core/balanced_order.h"

namespace twobp {
namespace {

// With so many samples, those of more replicas hardly change the first one's.
constexpr size_t kMostSamples = 4096;

}  // namespace

std::vector<double> typical_batch(const std::vector<double>& sample_costs, const BatchShape& shape) {
  if (sample_costs.empty()) return {};
  const auto size = static_cast<size_t>(shape.micro_batch_size);
  const auto micro_batches = static_cast<size_t>(shape.micro_batches);
  const auto most = static_cast<int>(std::max<size_t>(1, kMostSamples / (micro_batches * size)));
  const int replicas = std::min(shape.replicas, most);
  const std::vector<double> costs = means_of_parts(sample_costs, replicas * micro_batches * size);
  std::vector<int64_t> whole;  // as datasets give them
  for (const double cost : costs) whole.push_back(std::llround(cost * 1e6));
  const auto order = balanced_order(whole, replicas, shape.micro_batches, shape.micro_batch_size);
  std::vector<double> batch(micro_batches, 0);
  for (size_t i = 0; i < micro_batches * size; ++i) {
    batch[i / size] += costs[order[i]] / static_cast<double>(size);
  }
  return batch;
}

}  // namespace twobp
