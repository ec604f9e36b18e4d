// A schedule as plain cells (single micro-batches, no messages, no decision left to the run), and the text
// form of such cells. It is that of PyTorch's pipelining (`_dump_csv` and `_load_csv` in
// torch/distributed/pipelining/schedules.py), so schedules can go both ways.
//
// A row is a rank, starting with rank 0. A cell is an instruction: stage, op, micro-batch, as in 0F0, 3I2,
// 3W2, 1B0. The rows give the placement of the stages. Rows may differ in length. Empty cells are PyTorch's
// idle steps and have no meaning.
#pragma once

#include <string>
#include <vector>

#include "twobp/schedule/schedule.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

// The cells in the order of the lists. A range becomes its micro-batches one after the other. Messages are
// left out. The policy of the result is placed if there is W, else off. Throws Error for `fill`, because its
// W has no place before it runs; use one of the other functions.
Schedule lower(const Schedule& schedule);

// The cells in the order in which they ended. `ran` has the ops of each rank in their order, each in as many
// parts as it ran in (`pieces` is not read). A cell goes where its last part ended. Other ops may have run
// between the parts of a W; as a cell it is whole. The result is free of deadlock if the run was. B in the
// schedule stays B, although I and W ran. Throws Error if `ran` is not a run of this schedule: if it has
// other ops, or lacks some.
Schedule lower(const Schedule& schedule, const std::vector<std::vector<RecordedOp>>& ran);

// The same for a simulated run (with its timeline). W under `fill` or under a byte cap goes where the
// simulation ran it.
Schedule lower(const Schedule& schedule, const Simulation& simulation);

// Writes one row for each rank, with "\n" after each. Ranges become single micro-batches. PyTorch adds the
// messages when it loads the file ("compute_only"). The form holds no name, no p2 policy and no byte cap: it
// gives only the order. Throws Error for `fill` (lower it in a simulated or recorded order first), for
// slices, and for a rank without stages.
std::string to_csv(const Schedule& schedule);

// Reads F, I, W and B (add_communication adds messages). Sets allow_reorder if a stage does not keep the
// order of micro-batches, because a file has no other way to say so. `name` is the name of the schedule, and
// of the file in messages.
//
// (0F1;1B0)OVERLAP_F_B is read as its cells, one after the other. Messages are skipped, because their places
// follow from the rest. UNSHARD, RESHARD and REDUCE_GRAD are skipped too: nothing is sharded here, and
// gradients are summed over micro-batches as W runs. LF, CR LF or CR end a row; blanks and double quotes
// around a cell, and a byte order mark, are skipped.
//
// Throws Error that names file, row, column and cell (counted from 1, the rank from 0) and the remedy. Errors
// are: an unknown op, a number that is too large, a blank row among others, a stage in two rows, missing
// stages or micro-batches, a repeated cell, and everything that `validate` finds, with its grid.
Schedule from_csv(const std::string& text, const std::string& name);
// Reads from a file. Throws Error if it cannot be read.
Schedule read_csv(const std::string& path);

}  // namespace twobp
