// The text form of a schedule: that of PyTorch's pipelining (`_dump_csv` and `_load_csv` in
// torch/distributed/pipelining/schedules.py), so that schedules go both ways.
//
// A row is a rank, from rank 0 on; a cell is what it does next: stage, op, micro-batch, as in 0F0, 3I2, 3W2,
// 1B0, and in the form with communication 0SEND_F0, 1RECV_F0, 1SEND_B0, 0RECV_B0. Which rank has which stage
// follows from the rows. Rows differ in length; empty cells are PyTorch's idle steps and have no meaning.
#pragma once

#include <cstdint>
#include <istream>
#include <string>
#include <string_view>

#include "twobp/schedule/schedule.h"

namespace twobp {

enum class CsvForm : uint8_t {
  kCompute,        // F, I, W and B alone: PyTorch's "compute_only", which it adds the messages to
  kCommunication,  // PyTorch's "compute_comms"
};
// "compute_only", "compute_comms".
std::string_view csv_form_name(CsvForm form);
CsvForm parse_csv_form(std::string_view name);

// A row a rank, with "\n" behind each. Ranges are written as single micro-batches (lower.h). Of the form with
// communication, as PyTorch makes it: ranks take turns, a cell each; a send follows its op, its receive
// stands where the receiver's row is at that moment, so that both sides have the messages between two ranks
// in one order and none waits in a circle; REDUCE_GRAD, in which PyTorch scales the gradients, follows a
// stage's last W or B. Its UNSHARD and RESHARD belong to FSDP and are not written.
//
// The form holds no name, no p2 policy and no byte cap: what it says is the order alone. Throws Error for
// `fill` (lower it in a simulated or recorded order first) and for a rank without stages.
std::string to_csv(const Schedule& schedule, CsvForm form = CsvForm::kCompute);

// Reads both forms: F, I, W, B without messages (passes.h puts them in), with allow_reorder where a stage
// does not keep to the order of micro-batches, which a file has no other way to say. `name` is the
// schedule's, and the file's in messages.
//
// (0F1;1B0)OVERLAP_F_B is read as its cells one after the other. UNSHARD, RESHARD and REDUCE_GRAD are passed
// over: nothing is sharded here, and gradients are summed over micro-batches as W runs. Messages are checked
// against the rest (each is sent and received once, after and before its ops, without deadlock), then left
// out: a posted receive waits at its op, which is where passes.h puts it.
//
// Throws Error that names file, row, column and cell (counted from 1, the rank from 0) and what to do: an
// unknown op, a number that is too large, a blank row among others, a stage in two rows, stages or
// micro-batches left out, a cell twice, and all that `validate` finds, with its grid.
Schedule from_csv(std::istream& in, const std::string& name);
Schedule from_csv(const std::string& text, const std::string& name);
// From a file. Throws Error if it cannot be read.
Schedule read_csv(const std::string& path);

}  // namespace twobp
