#include "twobp/schedule/simulate/for_training.h"

#include <algorithm>
#include <cmath>

namespace twobp {
namespace {

constexpr int kMostSteps = 64;
constexpr double kSame = 1e-9;  // relative to a step: sums of the same costs in another order

std::vector<double> ends_of(const Simulation& simulation) {
  std::vector<double> ends;
  for (const RankSimulation& rank : simulation.ranks) ends.push_back(rank.end);
  return ends;
}

// Whether the time since the end of the previous step is the same on all ranks.
bool moves_as_one(const std::vector<double>& before, const std::vector<double>& now) {
  const double first = now[0] - before[0];
  for (size_t rank = 1; rank < now.size(); ++rank) {
    if (std::abs(now[rank] - before[rank] - first) > kSame * first) return false;
  }
  return true;
}

double last(const std::vector<double>& ends) {
  return *std::max_element(ends.begin(), ends.end());
}

}  // namespace

StepPeriods step_periods(const Schedule& schedule, const std::vector<StageCost>& costs, SimulationOptions options,
                         NormNeed norm) {
  options.timeline = false;
  const Simulation alone = simulate(schedule, costs, options);
  options.check = false;
  StepPeriods periods{alone.step_seconds, 0, 0};
  // By step: the end of each rank.
  std::vector<std::vector<double>> ends = {ends_of(alone)};
  while (periods.overlap == 0 && ends.size() < kMostSteps) {
    const size_t step = ends.size();
    options.begin = ends[step - 1];
    if (norm == NormNeed::kAfterForwards) options.norm_known = last(ends[step - 1]);
    const double two_before = step >= 2 ? last(ends[step - 2]) : 0;
    for (double& begin : options.begin) begin = std::max(begin, two_before);
    ends.push_back(ends_of(simulate(schedule, costs, options)));
    if (moves_as_one(ends[step - 1], ends[step])) periods.overlap = ends[step][0] - ends[step - 1][0];
    if (ends[step][0] == 0) break;  // nothing costs anything
  }
  if (periods.overlap == 0) {
    const size_t half = ends.size() / 2;
    periods.overlap = (last(ends.back()) - last(ends[half])) / static_cast<double>(ends.size() - 1 - half);
  }
  for (const RankSimulation& rank : alone.ranks) {
    if (periods.overlap > 0) periods.idle += (1 - rank.busy / periods.overlap) / schedule.rank_count();
  }
  return periods;
}

int forwards_ahead(const Schedule& schedule, const std::vector<StageCost>& costs, SimulationOptions options, int most) {
  constexpr double kLeastGain = 1.02;
  if (schedule.frozen == 0 || schedule.slices > 1 || !fills_waits(schedule, costs, options)) return 0;
  options.timeline = false;
  options.ahead = 0;
  double least = simulate(schedule, costs, options).step_seconds / kLeastGain;
  options.check = false;
  int best = 0;
  for (int ahead = 1; ahead <= std::min(most, schedule.micro_batches); ++ahead) {
    options.ahead = ahead;
    const double seconds = simulate(schedule, costs, options).step_seconds;
    if (seconds >= least) continue;
    least = seconds;
    best = ahead;
  }
  return best;
}

std::vector<std::vector<int>> p2_places(const Schedule& schedule, const Simulation& simulation) {
  std::vector<std::vector<int>> places;
  const auto recorded = recorded_order(simulation);
  for (size_t rank = 0; rank < recorded.size(); ++rank) {
    std::vector<int> before;  // pieces before each F and I
    int pieces = 0;
    for (const RecordedOp& op : recorded[rank]) {
      if (op.op == Op::kBackwardP2) {
        pieces += op.pieces;
      } else {
        before.push_back(pieces);
      }
    }
    auto& of_rank = places.emplace_back();
    size_t next = 0;  // F or I
    for (const Instruction& instruction : schedule.ranks[rank]) {
      of_rank.push_back(is_receive(instruction.op) ? before.at(next) : 0);
      if (is_compute(instruction.op) && instruction.op != Op::kBackwardP2) next += instruction.count;
    }
  }
  return places;
}

}  // namespace twobp
