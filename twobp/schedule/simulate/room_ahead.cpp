#include "twobp/schedule/simulate/room_ahead.h"

#include <algorithm>
#include <limits>

#include "twobp/schedule/check/walk.h"
#include "twobp/schedule/simulate/stage_model.h"

namespace twobp {
namespace {

constexpr double kNone = -std::numeric_limits<double>::infinity();

bool holds_p2_back(P2Policy policy) {
  return policy == P2Policy::kEnd || policy == P2Policy::kCooldown;
}

}  // namespace

RoomAhead::RoomAhead(const std::vector<Instruction>& list, const std::vector<StageModel>& models)
    : uses_(list.size()) {
  double after = kNone;
  for (size_t i = list.size(); i-- > 0;) {
    const StageModel& model = models[list[i].stage];
    Use& use = uses_[i];
    use = {kNone, 0, after};
    const auto op = [&](const OpModel& of) {
      use.need = of.whole.need;
      use.held = of.whole.held;
    };
    switch (list[i].op) {
      case Op::kForward:
        op(model.forward);
        break;
      case Op::kBackwardP1:
        op(model.backward_p1);
        break;
      case Op::kBackward:
        op(model.backward);
        break;
      case Op::kBackwardP2:
        after = kNone;
        continue;
      case Op::kSendForward:
      case Op::kSendBackward:
        use.held = -message_bytes(models, list[i].op, list[i].stage);
        break;
      case Op::kRecvForward:
      case Op::kRecvBackward:
        use.held = message_bytes(models, sender_op(list[i].op), sender_stage(list[i]));
        if (use.held > 0) use.need = use.held + model.largest_p2;
        break;
    }
    after = at(i, list[i].count);
  }
}

double RoomAhead::at(size_t index, int left) const {
  if (index >= uses_.size()) return 0;
  const Use& use = uses_[index];
  return std::max({use.need, (left - 1) * use.held + use.need, left * use.held + use.after});
}

std::vector<RoomAhead> room_ahead(const Schedule& schedule, const std::vector<StageModel>& models) {
  std::vector<RoomAhead> ranks(schedule.ranks.size());
  if (!holds_p2_back(schedule.policy)) return ranks;
  for (size_t rank = 0; rank < ranks.size(); ++rank) ranks[rank] = {schedule.ranks[rank], models};
  return ranks;
}

std::vector<RoomAhead> room_ahead(const Schedule& schedule, const std::vector<StageCost>& costs) {
  if (!holds_p2_back(schedule.policy)) return std::vector<RoomAhead>(schedule.ranks.size());
  return room_ahead(schedule, stage_models(schedule, costs, true));
}

}  // namespace twobp
