#include "twobp/schedule/simulate/p2_places.h"

namespace twobp {

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
