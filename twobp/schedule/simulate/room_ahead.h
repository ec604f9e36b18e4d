// What the ops ahead of a rank ask of its memory. W that a byte cap would force before one of them costs less
// in a wait that comes sooner, whatever the policy.
#pragma once

#include <cstddef>
#include <vector>

#include "twobp/schedule/schedule.h"
#include "twobp/schedule/simulate/stage_cost.h"

namespace twobp {

struct StageModel;

// Of one rank; bytes beside what it holds.
class RoomAhead {
 public:
  RoomAhead() = default;  // of a rank that looks at nothing
  RoomAhead(const std::vector<Instruction>& list, const std::vector<StageModel>& models);

  // Room that would do for all ops before the next W of the list, if no W ran before that: from instruction
  // `index` on, of which `left` micro-batches are to come. 0 or less: they ask for none.
  double at(size_t index, int left) const;

 private:
  struct Use {
    double need;   // room one micro-batch asks for
    double held;   // what it leaves
    double after;  // room for the instructions behind this one
  };
  std::vector<Use> uses_;  // by instruction
};

// By rank. All look at nothing where no W is held back that could come sooner: `off`, `fill`, which uses
// every wait anyhow, and `placed`, whose planner has chosen the waits.
std::vector<RoomAhead> room_ahead(const Schedule& schedule, const std::vector<StageModel>& models);
std::vector<RoomAhead> room_ahead(const Schedule& schedule, const std::vector<StageCost>& costs);

}  // namespace twobp
