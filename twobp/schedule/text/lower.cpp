// A cell goes where the last part of its op ended. Completion times respect every dependency, so the order of
// completion on each rank does too.
#include "twobp/schedule/text/lower.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "twobp/core/check.h"

namespace twobp {
namespace {

// F, I (or B) and W of every (stage, micro-batch).
constexpr size_t kKinds = 3;

size_t kind_of(Op op) {
  switch (op) {
    case Op::kForward:
      return 0;
    case Op::kBackwardP2:
      return 2;
    default:
      return 1;
  }
}

bool has_p2(const Schedule& schedule) {
  for (const auto& list : schedule.ranks) {
    for (const Instruction& i : list) {
      if (i.op == Op::kBackwardP2) return true;
    }
  }
  return false;
}

// The cells of all ranks, as a table of (stage, micro-batch, kind).
class Cells {
 public:
  explicit Cells(const Schedule& schedule) : schedule_(schedule) {
    ops_.assign(static_cast<size_t>(schedule.stages) * schedule.micro_batches * kKinds, 0);
    for (const auto& list : schedule.ranks) {
      for (const Instruction& i : list) {
        if (!is_compute(i.op)) continue;
        for (int k = 0; k < i.count; ++k) {
          ops_.at(slot(i.stage, i.micro_batch + k, kind_of(i.op))) = 1 + static_cast<uint8_t>(i.op);
        }
      }
    }
  }

  size_t size() const { return ops_.size(); }
  size_t slot(int stage, int micro_batch, size_t kind) const {
    return (static_cast<size_t>(stage) * schedule_.micro_batches + micro_batch) * kKinds + kind;
  }
  bool has(size_t slot) const { return ops_[slot] != 0; }
  Instruction cell(size_t slot) const {
    const size_t pair = slot / kKinds;
    return {static_cast<Op>(ops_[slot] - 1), static_cast<int>(pair / schedule_.micro_batches),
            static_cast<int>(pair % schedule_.micro_batches), 1};
  }

  // The cell that a part of an op belongs to. Both halves of a B belong to the cell of the B.
  size_t cell_of(int rank, const RecordedOp& ran) const {
    const auto text = [&] { return to_string({ran.op, ran.stage, ran.micro_batch}); };
    TWOBP_CHECK(is_compute(ran.op) && ran.stage >= 0 && ran.stage < schedule_.stages && ran.micro_batch >= 0 &&
                    ran.micro_batch < schedule_.micro_batches,
                "schedule '", schedule_.name, "' has no ", text(), ", which ran on rank ", rank);
    TWOBP_CHECK(schedule_.rank_of_stage[ran.stage] == rank, text(), " ran on rank ", rank, ", but schedule '",
                schedule_.name, "' places stage ", ran.stage, " on rank ", schedule_.rank_of_stage[ran.stage]);
    const size_t p1 = slot(ran.stage, ran.micro_batch, 1);
    const bool whole = ops_[p1] == 1 + static_cast<uint8_t>(Op::kBackward);
    TWOBP_CHECK(ran.op != Op::kBackward || whole, text(), " ran, but schedule '", schedule_.name,
                "' has a separate I and W in its place");
    const size_t at = whole && ran.op != Op::kForward ? p1 : slot(ran.stage, ran.micro_batch, kind_of(ran.op));
    TWOBP_CHECK(has(at), "schedule '", schedule_.name, "' has no ", text(), ", which ran on rank ", rank);
    return at;
  }

 private:
  const Schedule& schedule_;
  std::vector<uint8_t> ops_;  // 1 + Op; 0: not in the schedule
};

Schedule without_instructions(const Schedule& schedule) {
  Schedule result;
  result.name = schedule.name;
  result.stages = schedule.stages;
  result.micro_batches = schedule.micro_batches;
  result.slices = schedule.slices;
  result.rank_of_stage = schedule.rank_of_stage;
  result.allow_reorder = schedule.allow_reorder;
  result.policy = has_p2(schedule) ? P2Policy::kPlaced : P2Policy::kOff;
  result.ranks.resize(schedule.ranks.size());
  return result;
}

}  // namespace

Schedule lower(const Schedule& schedule) {
  TWOBP_CHECK(!schedule.fills(), "schedule '", schedule.name,
              "' has p2 fill: its W get their places only in a run, so it has no cells yet. Lower it in a simulated "
              "or a recorded order, or choose p2 off, end, cooldown or placed");
  Schedule result = without_instructions(schedule);
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    for (const Instruction& i : schedule.ranks[rank]) {
      if (!is_compute(i.op)) continue;
      for (int k = 0; k < i.count; ++k) result.ranks[rank].push_back({i.op, i.stage, i.micro_batch + k, 1});
    }
  }
  return result;
}

Schedule lower(const Schedule& schedule, const std::vector<std::vector<RecordedOp>>& ran) {
  TWOBP_CHECK(ran.size() == schedule.ranks.size(), "the order has ", ran.size(), " ranks, but schedule '",
              schedule.name, "' has ", schedule.ranks.size());
  const Cells cells(schedule);
  constexpr size_t kNever = SIZE_MAX;
  std::vector<size_t> last(cells.size(), kNever);
  for (size_t rank = 0; rank < ran.size(); ++rank) {
    for (size_t i = 0; i < ran[rank].size(); ++i) {
      last[cells.cell_of(static_cast<int>(rank), ran[rank][i])] = i;
    }
  }
  for (size_t slot = 0; slot < cells.size(); ++slot) {
    TWOBP_CHECK(!cells.has(slot) || last[slot] != kNever, to_string(cells.cell(slot)), " of schedule '", schedule.name,
                "' never ran: the order must have every op of the step");
  }
  Schedule result = without_instructions(schedule);
  for (size_t rank = 0; rank < ran.size(); ++rank) {
    for (size_t i = 0; i < ran[rank].size(); ++i) {
      const size_t slot = cells.cell_of(static_cast<int>(rank), ran[rank][i]);
      if (last[slot] == i) result.ranks[rank].push_back(cells.cell(slot));
    }
  }
  return result;
}

Schedule lower(const Schedule& schedule, const Simulation& simulation) {
  return lower(schedule, recorded_order(simulation));
}

Schedule keep_micro_batches(Schedule schedule, int micro_batches) {
  TWOBP_CHECK(micro_batches >= 1 && micro_batches <= schedule.micro_batches, "schedule '", schedule.name, "' is for ",
              schedule.micro_batches, " micro-batches and cannot run ", micro_batches);
  if (micro_batches == schedule.micro_batches) return schedule;
  for (auto& list : schedule.ranks) {
    std::erase_if(list, [&](const Instruction& i) { return i.micro_batch >= micro_batches; });
    for (Instruction& i : list) i.count = std::min(i.count, micro_batches - i.micro_batch);
  }
  schedule.micro_batches = micro_batches;
  return schedule;
}

}  // namespace twobp
