#include "twobp/data/subset.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "twobp/core/check.h"

namespace twobp {

Subset::Subset(std::shared_ptr<const Dataset> whole, std::vector<int64_t> indices)
    : whole_(std::move(whole)), indices_(std::move(indices)) {}

Fields Subset::read(const std::vector<int64_t>& indices, int64_t epoch) const {
  std::vector<int64_t> of_whole;
  of_whole.reserve(indices.size());
  for (const int64_t index : indices) {
    TWOBP_CHECK(index >= 0 && index < size(), "data: no sample ", index, ", there are ", size(), ".");
    of_whole.push_back(indices_[static_cast<size_t>(index)]);
  }
  return whole_->read(of_whole, epoch);
}

DataSplit hold_out_by_class(std::shared_ptr<Dataset> whole, const std::vector<int64_t>& labels, double fraction,
                            uint64_t seed) {
  if (fraction == 0) return {std::move(whole), nullptr};
  std::map<int64_t, std::vector<int64_t>> classes;
  for (size_t i = 0; i < labels.size(); ++i) classes[labels[i]].push_back(static_cast<int64_t>(i));
  const auto largest = std::max_element(classes.begin(), classes.end(),
                                        [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
  TWOBP_CHECK(largest != classes.end() && largest->second.size() >= 2,
              "data: no class has two samples, so data.held_out (", fraction,
              ") would leave none for training: set data.held_out to 0, or give more data.");
  std::vector<int64_t> train;
  std::vector<int64_t> held_out;
  double owed = 0;  // carries the rounding, so that the sum over the classes is right
  for (auto entry = classes.begin(); entry != classes.end(); ++entry) {
    const auto& samples = entry->second;
    const auto size = static_cast<int64_t>(samples.size());
    owed += fraction * static_cast<double>(size);
    const int64_t taken = std::clamp<int64_t>(std::llround(owed), 0, size - 1);
    owed -= static_cast<double>(taken);
    const std::vector<int64_t> order = epoch_order(size, /*shuffle=*/true, seed, entry->first);
    for (int64_t i = 0; i < size; ++i) {
      (i < taken ? held_out : train).push_back(samples[static_cast<size_t>(order[static_cast<size_t>(i)])]);
    }
  }
  std::sort(train.begin(), train.end());
  if (held_out.empty()) {
    held_out.push_back(largest->second.back());
    train.erase(std::find(train.begin(), train.end(), held_out.front()));
  }
  std::vector<int64_t> shuffled;
  for (const int64_t i : epoch_order(static_cast<int64_t>(held_out.size()), /*shuffle=*/true, seed, -1)) {
    shuffled.push_back(held_out[static_cast<size_t>(i)]);
  }
  return {std::make_shared<Subset>(whole, std::move(train)), std::make_shared<Subset>(whole, std::move(shuffled))};
}

}  // namespace twobp
