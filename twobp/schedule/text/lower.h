// A schedule as plain cells, which the text form (csv.h) can hold: single micro-batches, no messages, and no decision
// left to the run.
#pragma once

#include <vector>

#include "twobp/schedule/schedule.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

// The cells in the order of the lists. A range becomes its micro-batches one after the other. Messages are left out.
// The policy of the result is placed if there is W, else off. Throws Error for `fill`, because its W has no place
// before it runs; use one of the other functions.
Schedule lower(const Schedule& schedule);

// The cells in the order in which they ended. `ran` has the ops of each rank in their order, each in as many parts as
// it ran in (`pieces` is not read). A cell goes where its last part ended. Other ops may have run between the parts of
// a W; as a cell it is whole. The result is free of deadlock if the run was. B in the schedule stays B, although I and
// W ran. Throws Error if `ran` is not a run of this schedule: if it has other ops, or lacks some.
Schedule lower(const Schedule& schedule, const std::vector<std::vector<RecordedOp>>& ran);

// The same for a simulated run (with its timeline). W under `fill` or under a byte cap goes where the simulation ran
// it.
Schedule lower(const Schedule& schedule, const Simulation& simulation);

// The schedule without the cells of micro-batches from `micro_batches` on. The others keep their order, so a valid
// schedule stays valid. Throws Error if the schedule has fewer.
Schedule keep_micro_batches(Schedule schedule, int micro_batches);

}  // namespace twobp
