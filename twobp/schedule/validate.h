// Proves, before anything runs, that a schedule with communication is complete, ordered and free of deadlock.
#pragma once

#include <string>

#include "twobp/schedule/schedule.h"

namespace twobp {

// Checks, with sends that never block:
//   - every stage is placed on a rank, its instructions are on that rank, and they name stages and
//     micro-batches that exist;
//   - every (stage, micro-batch) has F once, and then either B once or I once and W once; or F alone for a
//     schedule without any backward;
//   - on a rank, F comes before I or B, I before W, and F, I (or B), W of a stage each run in micro-batch
//     order, unless allow_reorder;
//   - every send has its receive and the other way round, each before/after its F, I or B; a stage's F and I
//     have their input (received, or handed over by a stage of the same rank that ran before);
//   - running all ranks to the end does not deadlock.
// Throws Error with what is wrong and the grid (a rank a line, a cell an instruction) with the bad cell
// marked between '>' and '<'.
void validate(const Schedule& schedule);

}  // namespace twobp
