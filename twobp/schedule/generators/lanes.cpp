#include "twobp/schedule/generators/lanes.h"

#include <cstddef>

namespace twobp {

void append_lanes(Schedule& schedule, int rank, const Rhythm& rhythm, const std::vector<Lane>& lanes) {
  auto& list = schedule.ranks[rank];
  list.reserve(list.size() + lanes.size() * schedule.micro_batches);
  std::vector<int> next(lanes.size(), 0);
  while (true) {
    size_t first = lanes.size();
    long long earliest = 0;
    for (size_t i = 0; i < lanes.size(); ++i) {
      if (next[i] == schedule.micro_batches) continue;
      const long long time = lanes[i].begin + rhythm.time(next[i]);
      if (first < lanes.size() && time >= earliest) continue;
      first = i;
      earliest = time;
    }
    if (first == lanes.size()) return;
    const int place = next[first]++;
    const Op op = lanes[first].op;
    list.push_back({op, lanes[first].stage, op == Op::kForward ? place : schedule.backward_order(place)});
  }
}

}  // namespace twobp
