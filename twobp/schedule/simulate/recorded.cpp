#include "twobp/core/check.h"
#include "twobp/schedule/check/walk.h"
#include "twobp/schedule/simulate/simulator.h"

namespace twobp {
namespace {

std::string text(const RecordedOp& op) {
  return to_string({op.op, op.stage, op.micro_batch, 1});
}

}  // namespace

RecordedOrder::RecordedOrder(const Schedule& schedule, const std::vector<std::vector<RecordedOp>>& recorded)
    : recorded_(recorded), at_(recorded.size(), 0), has_receives_(recorded.size(), false) {
  if (recorded.empty()) return;
  TWOBP_CHECK(recorded.size() == schedule.ranks.size(), "the recorded order has ", recorded.size(),
              " ranks, but schedule '", schedule.name, "' has ", schedule.ranks.size());
  for (int rank = 0; rank < schedule.rank_count(); ++rank) {
    for (const RecordedOp& op : recorded[rank]) {
      if (is_receive(op.op)) has_receives_[rank] = true;
      TWOBP_CHECK(op.op != Op::kBackward && !is_send(op.op), "the recorded order of rank ", rank, " has ",
                  op_name(op.op), ": only F, I, W and receives are recorded");
      TWOBP_CHECK(op.stage >= 0 && op.stage < schedule.stages && schedule.rank_of_stage[op.stage] == rank &&
                      op.micro_batch >= 0 && op.micro_batch < schedule.micro_batches && op.pieces >= 0,
                  "the recorded order of rank ", rank, " has ", text(op), ", which schedule '", schedule.name,
                  "' does not have on that rank");
    }
  }
}

const RecordedOp* RecordedOrder::next_w(int rank) const {
  if (recorded_.empty()) return nullptr;
  const auto& list = recorded_[rank];
  if (at_[rank] == list.size() || list[at_[rank]].op != Op::kBackwardP2) return nullptr;
  return &list[at_[rank]];
}

void RecordedOrder::take_receive(int rank, Op op, int stage, int micro_batch) {
  if (recorded_.empty() || at_[rank] == recorded_[rank].size()) return;
  const RecordedOp& next = recorded_[rank][at_[rank]];
  if (next.op == op && next.stage == stage && next.micro_batch == micro_batch) ++at_[rank];
}

void RecordedOrder::take(int rank, Op op, int stage, int micro_batch) {
  if (recorded_.empty()) return;
  const auto& list = recorded_[rank];
  const RecordedOp wanted{op, stage, micro_batch, 0};
  TWOBP_CHECK(at_[rank] < list.size(), "the recorded order of rank ", rank, " ends before ", text(wanted));
  const RecordedOp& next = list[at_[rank]++];
  TWOBP_CHECK(next.op == op && next.stage == stage && next.micro_batch == micro_batch, "the recorded order of rank ",
              rank, " has ", text(next), " where the schedule has ", text(wanted), ": it belongs to another schedule");
}

std::vector<std::vector<RecordedOp>> recorded_order(const Simulation& simulation) {
  std::vector<std::vector<RecordedOp>> recorded;
  for (const RankSimulation& rank : simulation.ranks) {
    TWOBP_CHECK(!rank.timeline.empty() || rank.busy == 0,
                "a simulation without a timeline has no order: simulate with SimulationOptions::timeline");
    auto& list = recorded.emplace_back();
    for (const SimulatedOp& op : rank.timeline) {
      if (op.part == 0) list.push_back({op.op, op.stage, op.micro_batch, op.pieces});
    }
  }
  return recorded;
}

}  // namespace twobp
