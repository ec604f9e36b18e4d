#include "twobp/plan/order_bytes.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "twobp/plan/stage_bytes.h"

namespace twobp {
namespace {

// Whether every stage of `a` holds at least as many as in `b`.
bool covers(const std::vector<int>& a, const std::vector<int>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] < b[i]) return false;
  }
  return true;
}

}  // namespace

OrderBytes::OrderBytes(const Schedule& schedule)
    : rank_of_stage_(schedule.rank_of_stage),
      in_flight_(schedule.stages, 0),
      stages_of_rank_(schedule.ranks.size()),
      moments_(schedule.ranks.size()) {
  std::vector<int> place(schedule.stages);  // index among the stages of its rank
  for (int stage = 0; stage < schedule.stages; ++stage) {
    auto& stages = stages_of_rank_[rank_of_stage_[stage]];
    place[stage] = static_cast<int>(stages.size());
    stages.push_back(stage);
  }
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    std::vector<int> held(stages_of_rank_[rank].size(), 0);
    for (const Instruction& i : schedule.ranks[rank]) {
      int& of_stage = held[place[i.stage]];
      if (i.op == Op::kBackwardP1 || i.op == Op::kBackward) of_stage -= i.count;
      if (i.op != Op::kForward) continue;
      for (int k = 0; k < i.count; ++k) {
        add(moments_[rank], {i.stage, held});
        ++of_stage;
      }
      in_flight_[i.stage] = std::max(in_flight_[i.stage], of_stage);
    }
  }
}

void OrderBytes::add(std::vector<Moment>& moments, Moment moment) {
  for (const Moment& other : moments) {
    if (other.stage == moment.stage && covers(other.held, moment.held)) return;
  }
  std::erase_if(moments, [&](const Moment& other) {
    return other.stage == moment.stage && covers(moment.held, other.held);
  });
  moments.push_back(std::move(moment));
}

double OrderBytes::least(const std::vector<StageCost>& costs) const {
  const auto bytes = stage_bytes(costs);
  double most = 0;
  for (size_t rank = 0; rank < moments_.size(); ++rank) {
    const auto& stages = stages_of_rank_[rank];
    double fixed = 0;
    for (const int stage : stages) fixed += costs[stage].fixed_bytes;
    double peak = 0;
    for (const Moment& moment : moments_[rank]) {
      double held = 0;
      for (size_t i = 0; i < stages.size(); ++i) {
        // Inconsistent costs may take away bytes that another micro-batch has brought.
        held += moment.held[i] * (bytes[stages[i]].activation - bytes[stages[i]].deficit);
      }
      const StageBytes& of = bytes[moment.stage];
      peak = std::max(peak, held + std::max(of.forward_peak, of.activation) - of.deficit);
    }
    most = std::max(most, fixed + peak);
  }
  return most;
}

}  // namespace twobp
