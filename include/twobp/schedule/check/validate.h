// Proves, before anything runs, that a schedule with communication is complete, ordered and free of deadlock.
#pragma once

#include <string>

#include "twobp/core/check.h"
#include "twobp/schedule/schedule.h"

namespace twobp {

// Thrown by validate, with the place of the fault: rank and index into its list, or -1 if no single cell
// shows it.
class InvalidSchedule : public Error {
 public:
  InvalidSchedule(const std::string& what, int rank, int index) : Error(what), rank(rank), index(index) {}

  int rank;
  int index;
};

// Checks:
//   - every stage is placed on a rank, its instructions are on that rank, and they name stages and
//     micro-batches that exist;
//   - every (stage, micro-batch) has F once, and then either B once or I once and W once; or only F for a
//     schedule without any backward;
//   - on a rank, F comes before I or B, I before W, and F, I (or B), W of a stage each run in micro-batch
//     order, unless allow_reorder;
//   - every send has its receive and vice versa, each before/after its F, I or B;
//   - F and I have their input (received, or handed over by a stage of the same rank that ran before);
//   - running all ranks to the end does not deadlock. Sends never block: messages wait at the receiver.
// Linear in the instructions.
// Throws Error with the fault and the grid (a line for each rank, a cell for each instruction) with the bad
// cell marked between '>' and '<'.
void validate(const Schedule& schedule);

}  // namespace twobp
