#include "twobp/schedule/generators/generators.h"

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

void append_phases(Schedule& schedule, int rank, std::array<int, 2> stages, const std::vector<Phase>& phases) {
  auto& list = schedule.ranks[rank];
  std::array<int, 2> forwards{};
  std::array<int, 2> backwards{};
  std::vector<Instruction> pending;
  size_t oldest = 0;
  const auto append = [&](const PhaseStep& step) {
    if (step.op == Op::kBackwardP2) {
      if (oldest < pending.size()) list.push_back(pending[oldest++]);
      return;
    }
    int& next = step.op == Op::kForward ? forwards[step.chunk] : backwards[step.chunk];
    const int place = next++;
    if (place >= schedule.micro_batches) return;
    const int m = step.op == Op::kForward ? place : schedule.backward_order(place);
    list.push_back({step.op, stages[step.chunk], m});
    if (step.op == Op::kBackwardP1) pending.push_back({Op::kBackwardP2, stages[step.chunk], m});
  };
  for (const Phase& phase : phases) {
    for (int i = 0; i < phase.times; ++i) {
      for (const PhaseStep& step : phase.steps) append(step);
    }
  }
}

}  // namespace twobp
