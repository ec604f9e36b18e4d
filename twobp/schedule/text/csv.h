// The text form of a schedule. It is that of PyTorch's pipelining (`_dump_csv` and `_load_csv` in
// torch/distributed/pipelining/schedules.py), so schedules can go both ways.
//
// A row is a rank, starting with rank 0. A cell is an instruction: stage, op, micro-batch, as in 0F0, 3I2, 3W2, 1B0.
// The form with communication also has 0SEND_F0, 1RECV_F0, 1SEND_B0, 0RECV_B0. The rows give the placement of the
// stages. Rows may differ in length. Empty cells are PyTorch's idle steps and have no meaning.
#pragma once

#include <cstdint>
#include <istream>
#include <string>
#include <string_view>

#include "twobp/schedule/schedule.h"

namespace twobp {

enum class CsvForm : uint8_t {
  kCompute,        // F, I, W and B only: PyTorch's "compute_only", to which it adds the messages
  kCommunication,  // PyTorch's "compute_comms"
};
// "compute_only", "compute_comms".
std::string_view csv_form_name(CsvForm form);
CsvForm parse_csv_form(std::string_view name);

// Writes one row for each rank, with "\n" after each. Ranges become single micro-batches (lower.h). The form with
// communication is written as PyTorch makes it. Ranks take turns, one cell each. A send follows its op, and its receive
// goes to the place that the receiver's row has reached. So both sides have the messages between two ranks in one
// order, and none waits in a circle. REDUCE_GRAD, in which PyTorch scales the gradients, follows a stage's last W or B.
// PyTorch's UNSHARD and RESHARD belong to FSDP and are not written.
//
// The form holds no name, no p2 policy and no byte cap: it gives only the order. Throws Error for `fill` (lower it in a
// simulated or recorded order first) and for a rank without stages.
std::string to_csv(const Schedule& schedule, CsvForm form = CsvForm::kCompute);

// Reads both forms into F, I, W and B without messages (passes.h adds them). Sets allow_reorder if a stage does not
// keep the order of micro-batches, because a file has no other way to say so. `name` is the name of the schedule, and
// of the file in messages.
//
// (0F1;1B0)OVERLAP_F_B is read as its cells, one after the other. UNSHARD, RESHARD and REDUCE_GRAD are skipped: nothing
// is sharded here, and gradients are summed over micro-batches as W runs. Messages are checked against the rest: each
// is sent and received once, after and before its ops, without deadlock. Then they are left out. A posted receive waits
// at its op, which is where passes.h puts it.
//
// Throws Error that names file, row, column and cell (counted from 1, the rank from 0) and the remedy. Errors are: an
// unknown op, a number that is too large, a blank row among others, a stage in two rows, missing stages or
// micro-batches, a repeated cell, and everything that `validate` finds, with its grid.
Schedule from_csv(std::istream& in, const std::string& name);
Schedule from_csv(const std::string& text, const std::string& name);
// Reads from a file. Throws Error if it cannot be read.
Schedule read_csv(const std::string& path);

}  // namespace twobp
