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
    : slices_(schedule.slices),
      rank_of_stage_(schedule.rank_of_stage),
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
    std::vector<int> held(stages_of_rank_[rank].size() * slices_, 0);
    std::vector<int> of_stage(stages_of_rank_[rank].size(), 0);
    for (const Instruction& i : schedule.ranks[rank]) {
      const bool forward = i.op == Op::kForward;
      if (!forward && i.op != Op::kBackwardP1 && i.op != Op::kBackward) continue;
      for (int m = i.micro_batch; m < i.micro_batch + i.count; ++m) {
        const int slice = m % slices_;
        if (forward) add(moments_[rank], {i.stage, slice, held});
        held[place[i.stage] * slices_ + slice] += forward ? 1 : -1;
        of_stage[place[i.stage]] += forward ? 1 : -1;
      }
      in_flight_[i.stage] = std::max(in_flight_[i.stage], of_stage[place[i.stage]]);
    }
  }
}

void OrderBytes::add(std::vector<Moment>& moments, Moment moment) {
  const auto same = [&](const Moment& other) { return other.stage == moment.stage && other.slice == moment.slice; };
  for (const Moment& other : moments) {
    if (same(other) && covers(other.held, moment.held)) return;
  }
  std::erase_if(moments, [&](const Moment& other) { return same(other) && covers(moment.held, other.held); });
  moments.push_back(std::move(moment));
}

double OrderBytes::least(const std::vector<StageCost>& costs) const {
  const size_t count = rank_of_stage_.size();
  const auto bytes = stage_bytes(costs, static_cast<int>(count), slices_);
  const auto of = [&](int stage, int slice) -> const StageBytes& {
    return bytes[costs.size() == count ? stage : slice * count + stage];
  };
  double most = 0;
  for (size_t rank = 0; rank < moments_.size(); ++rank) {
    const auto& stages = stages_of_rank_[rank];
    double fixed = 0;
    for (const int stage : stages) fixed += costs[stage].fixed_bytes;
    double peak = 0;
    for (const Moment& moment : moments_[rank]) {
      double held = 0;
      for (size_t i = 0; i < moment.held.size(); ++i) {
        const StageBytes& each = of(stages[i / slices_], static_cast<int>(i % slices_));
        // Inconsistent costs may take away bytes that another micro-batch has brought.
        held += moment.held[i] * (each.activation - each.deficit);
      }
      const StageBytes& next = of(moment.stage, moment.slice);
      peak = std::max(peak, held + std::max(next.forward_peak, next.activation) - next.deficit);
    }
    most = std::max(most, fixed + peak);
  }
  return most;
}

}  // namespace twobp
