#include "twobp/core/balanced_order.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>

#include "twobp/core/check.h"

namespace twobp {
namespace {

bool all_equal(const std::vector<int64_t>& costs) {
  return std::adjacent_find(costs.begin(), costs.end(), std::not_equal_to<>()) == costs.end();
}

// Items by bin, in order: from the costliest on, each goes to the bin that costs least and has room.
std::vector<std::vector<size_t>> fill(const std::vector<int64_t>& costs, int64_t bins, int64_t capacity) {
  std::vector<size_t> order(costs.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return costs[a] > costs[b]; });
  std::vector<std::vector<size_t>> filled(static_cast<size_t>(bins));
  // Bins with room, the one that costs least first, and of equal ones the first.
  using Bin = std::pair<int64_t, size_t>;
  std::priority_queue<Bin, std::vector<Bin>, std::greater<>> least;
  for (size_t bin = 0; bin < filled.size(); ++bin) least.emplace(0, bin);
  for (const size_t item : order) {
    const auto [sum, bin] = least.top();
    least.pop();
    filled[bin].push_back(item);
    if (std::cmp_less(filled[bin].size(), capacity)) least.emplace(sum + costs[item], bin);
  }
  for (std::vector<size_t>& items : filled) std::sort(items.begin(), items.end());
  return filled;
}

// Rising costs and then falling ones: from the cheapest on, items go to the front and to the back in turn.
void costliest_in_the_middle(const std::vector<int64_t>& costs, std::vector<size_t>& items) {
  std::stable_sort(items.begin(), items.end(), [&](size_t a, size_t b) { return costs[a] < costs[b]; });
  std::vector<size_t> ordered(items.size());
  for (size_t i = 0; i < items.size(); ++i) ordered[i % 2 == 0 ? i / 2 : items.size() - 1 - i / 2] = items[i];
  items = std::move(ordered);
}

}  // namespace

std::vector<size_t> balanced_order(const std::vector<int64_t>& costs, int64_t replicas, int64_t micro_batches,
                                   int64_t micro_batch_size) {
  TWOBP_CHECK(std::cmp_equal(costs.size(), replicas * micro_batches * micro_batch_size), "a batch of ", costs.size(),
              " samples is not ", replicas, " x ", micro_batches, " micro-batches of ", micro_batch_size);
  std::vector<size_t> order(costs.size());
  std::iota(order.begin(), order.end(), size_t{0});
  if (all_equal(costs)) return order;
  const auto samples = fill(costs, replicas * micro_batches, micro_batch_size);
  std::vector<int64_t> sums;
  for (const auto& micro_batch : samples) {
    sums.push_back(0);
    for (const size_t sample : micro_batch) sums.back() += costs[sample];
  }
  order.clear();
  for (auto& replica : fill(sums, replicas, micro_batches)) {
    costliest_in_the_middle(sums, replica);
    for (const size_t micro_batch : replica)
      order.insert(order.end(), samples[micro_batch].begin(), samples[micro_batch].end());
  }
  return order;
}

std::vector<double> means_of_parts(const std::vector<double>& values, size_t parts) {
  std::vector<double> means;
  const double length = static_cast<double>(values.size()) / static_cast<double>(parts);
  for (size_t part = 0; part < parts; ++part) {
    const double begin = length * static_cast<double>(part);
    const double end = begin + length;
    double sum = 0;
    for (auto i = static_cast<size_t>(begin); i < values.size() && static_cast<double>(i) < end; ++i) {
      const auto at = static_cast<double>(i);
      sum += values[i] * std::max(0.0, std::min(at + 1, end) - std::max(at, begin));
    }
    means.push_back(sum / length);
  }
  return means;
}

}  // namespace twobp
