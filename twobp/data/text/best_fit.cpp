#include "twobp/data/text/best_fit.h"

#include <algorithm>
#include <map>
#include <numeric>

namespace twobp {

std::vector<std::vector<int64_t>> best_fit(const std::vector<int64_t>& lengths, int64_t capacity) {
  std::vector<int64_t> order(lengths.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  const auto length = [&](int64_t document) { return lengths[static_cast<size_t>(document)]; };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return length(a) > length(b); });
  std::vector<std::vector<int64_t>> samples;
  std::map<int64_t, std::vector<size_t>> by_room;
  for (const int64_t document : order) {
    const auto found = by_room.lower_bound(length(document));
    size_t sample = samples.size();
    int64_t room = capacity;
    if (found == by_room.end()) {
      samples.emplace_back();
    } else {
      room = found->first;
      sample = found->second.back();
      found->second.pop_back();
      if (found->second.empty()) by_room.erase(found);
    }
    samples[sample].push_back(document);
    by_room[room - length(document)].push_back(sample);
  }
  for (auto& sample : samples) std::sort(sample.begin(), sample.end());
  std::sort(samples.begin(), samples.end());
  return samples;
}

}  // namespace twobp
