// A schedule as plain cells: single micro-batches, no messages, and nothing left that is decided while it
// runs. What the text form (csv.h) can hold.
#pragma once

#include <vector>

#include "twobp/schedule/schedule.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

// The cells as they stand in the lists: a range becomes its micro-batches one after the other, messages are
// left out. The policy of the result is placed where there is W, else off. Throws Error for `fill`, whose W
// has no place before it runs: use one of the others.
Schedule lower(const Schedule& schedule);

// The cells in the order in which they were done: `ran` has the ops of each rank in their order, any of them
// in as many parts as it ran in (`pieces` is not read), and a cell stands where its last part ended. Between
// its parts a W may have let other ops pass; as a cell it is whole. The result is free of deadlock where what
// ran was. I and W of what the schedule has as B stay B. Throws Error when `ran` is not a run of this
// schedule: ops that it has not, or lacks some.
Schedule lower(const Schedule& schedule, const std::vector<std::vector<RecordedOp>>& ran);

// The same for a simulated run (with its timeline): W under `fill` or under a byte cap where the simulation
// ran it.
Schedule lower(const Schedule& schedule, const Simulation& simulation);

// The schedule without the cells of micro-batches from `micro_batches` on. What is left keeps its order, so
// a valid schedule stays valid. Throws Error when there are fewer.
Schedule keep_micro_batches(Schedule schedule, int micro_batches);

}  // namespace twobp
