#include "twobp/data/balance.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "twobp/core/balanced_order.h"

namespace twobp {
namespace {

constexpr size_t kParts = 64;

}  // namespace

std::vector<int64_t> balanced_samples(const Dataset& dataset, const std::vector<int64_t>& samples, int64_t replicas,
                                      int64_t micro_batches, int64_t micro_batch_size) {
  std::vector<int64_t> costs;
  for (const int64_t sample : samples) costs.push_back(dataset.cost(sample));
  std::vector<int64_t> ordered;
  for (const size_t i : balanced_order(costs, replicas, micro_batches, micro_batch_size)) {
    ordered.push_back(samples[i]);
  }
  return ordered;
}

double mean_cost(const Dataset& dataset) {
  bool equal = true;
  double sum = 0;
  for (int64_t sample = 0; sample < dataset.size(); ++sample) {
    const int64_t cost = dataset.cost(sample);
    equal &= cost == dataset.cost(0);
    sum += static_cast<double>(cost);
  }
  return equal ? 0 : sum / static_cast<double>(dataset.size());
}

std::vector<double> batch_costs(const Dataset& dataset, const std::vector<int64_t>& samples, int64_t micro_batch_size,
                                double mean) {
  const auto size = static_cast<size_t>(micro_batch_size);
  std::vector<double> costs(samples.size() / size, 0);
  for (size_t i = 0; i < samples.size(); ++i)
    costs[i / size] += static_cast<double>(dataset.cost(samples[i])) / static_cast<double>(size) / mean;
  return costs;
}

std::vector<double> relative_costs(const Dataset& dataset) {
  const double mean = mean_cost(dataset);
  if (mean == 0) return {};
  std::vector<double> costs;
  for (int64_t sample = 0; sample < dataset.size(); ++sample) {
    costs.push_back(static_cast<double>(dataset.cost(sample)) / mean);
  }
  std::sort(costs.begin(), costs.end());
  return means_of_parts(costs, kParts);
}

std::vector<int64_t> typical_samples(const Dataset& dataset, int64_t count) {
  const double mean = mean_cost(dataset);
  const int64_t taken = std::min(count, dataset.size());
  std::vector<int64_t> samples(static_cast<size_t>(mean == 0 ? taken : dataset.size()));
  std::iota(samples.begin(), samples.end(), int64_t{0});
  if (mean == 0) return samples;
  std::vector<double> apart;
  for (const int64_t sample : samples) apart.push_back(std::abs(static_cast<double>(dataset.cost(sample)) - mean));
  std::stable_sort(samples.begin(), samples.end(),
                   [&](int64_t a, int64_t b) { return apart[static_cast<size_t>(a)] < apart[static_cast<size_t>(b)]; });
  samples.resize(static_cast<size_t>(taken));
  std::sort(samples.begin(), samples.end());
  return samples;
}

int64_t costliest_sample(const Dataset& dataset) {
  int64_t costliest = 0;
  for (int64_t sample = 1; sample < dataset.size(); ++sample) {
    if (dataset.cost(sample) > dataset.cost(costliest)) costliest = sample;
  }
  return costliest;
}

}  // namespace twobp
