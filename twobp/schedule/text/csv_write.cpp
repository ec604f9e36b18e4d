// Writing the text form.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/schedule/text/csv.h"
#include "twobp/schedule/text/lower.h"

namespace twobp {
namespace {

// An instruction for one micro-batch, or REDUCE_GRAD of a stage.
struct Cell {
  Instruction instruction;
  bool reduce_grad = false;
};

void append(std::string& row, const Cell& cell) {
  if (!row.empty()) row += ',';
  row += cell.reduce_grad ? std::to_string(cell.instruction.stage) + "REDUCE_GRAD" : to_string(cell.instruction);
}

// Ranks take turns, one cell each. They wait until the inputs of their next cell have been written. A waiting rank is
// looked at again when one of its inputs is written. The sender writes both ends of a message.
class Rows {
 public:
  explicit Rows(const Schedule& schedule) : schedule_(schedule), rows_(schedule.ranks.size()) {
    there_.assign(static_cast<size_t>(schedule.stages) * schedule.micro_batches, 0);
    for (const auto& list : schedule.ranks) lists_.push_back(with_reduce_grad(list));
  }

  std::vector<std::string> run() {
    std::vector<size_t> next(lists_.size(), 0);
    std::vector<bool> waits(lists_.size(), false);
    using Turn = std::pair<size_t, int>;  // the round, and the rank
    std::priority_queue<Turn, std::vector<Turn>, std::greater<>> turns;
    for (int rank = 0; rank < schedule_.rank_count(); ++rank) turns.emplace(0, rank);
    while (!turns.empty()) {
      const auto [round, rank] = turns.top();
      turns.pop();
      if (next[rank] == lists_[rank].size()) continue;
      const Cell& cell = lists_[rank][next[rank]];
      waits[rank] = !cell.reduce_grad && !ready(cell.instruction);
      if (waits[rank]) continue;
      const int receiver = write(rank, cell);
      ++next[rank];
      turns.emplace(round + 1, rank);
      if (receiver < 0 || !waits[receiver]) continue;
      waits[receiver] = false;
      turns.emplace(receiver > rank ? round : round + 1, receiver);
    }
    for (size_t rank = 0; rank < lists_.size(); ++rank) {
      TWOBP_CHECK(next[rank] == lists_[rank].size(), "schedule '", schedule_.name, "' deadlocks: rank ", rank,
                  " never gets the input of ", to_string(lists_[rank][next[rank]].instruction));
    }
    return std::move(rows_);
  }

 private:
  static constexpr uint8_t kInput = 1;           // of F
  static constexpr uint8_t kOutputGradient = 2;  // of I or B

  std::vector<Cell> with_reduce_grad(const std::vector<Instruction>& list) const {
    std::vector<int> left(schedule_.stages, schedule_.micro_batches);
    std::vector<Cell> cells;
    for (const Instruction& i : list) {
      cells.push_back({i});
      const bool ends = i.op == Op::kBackwardP2 || i.op == Op::kBackward;
      if (ends && --left[i.stage] == 0) cells.push_back({{Op::kBackwardP2, i.stage, 0, 1}, true});
    }
    return cells;
  }

  uint8_t& there(int stage, int m) { return there_[static_cast<size_t>(stage) * schedule_.micro_batches + m]; }

  bool ready(const Instruction& i) {
    if (i.op == Op::kForward) return i.stage == 0 || (there(i.stage, i.micro_batch) & kInput) != 0;
    return i.stage + 1 == schedule_.stages || (there(i.stage, i.micro_batch) & kOutputGradient) != 0;
  }

  // Returns the rank that it sends to, or -1.
  int write(int rank, const Cell& cell) {
    append(rows_[rank], cell);
    const Instruction& i = cell.instruction;
    if (cell.reduce_grad || i.op == Op::kBackwardP2) return -1;
    const bool forward = i.op == Op::kForward;
    const int to = i.stage + (forward ? 1 : -1);
    if (to < 0 || to == schedule_.stages) return -1;
    there(to, i.micro_batch) |= forward ? kInput : kOutputGradient;
    const int receiver = schedule_.rank_of_stage[to];
    if (receiver == rank) return -1;
    append(rows_[rank], {{forward ? Op::kSendForward : Op::kSendBackward, i.stage, i.micro_batch, 1}});
    append(rows_[receiver], {{forward ? Op::kRecvForward : Op::kRecvBackward, to, i.micro_batch, 1}});
    return receiver;
  }

  const Schedule& schedule_;
  std::vector<std::vector<Cell>> lists_;
  std::vector<uint8_t> there_;  // per (stage, micro-batch)
  std::vector<std::string> rows_;
};

}  // namespace

std::string_view csv_form_name(CsvForm form) {
  return form == CsvForm::kCompute ? "compute_only" : "compute_comms";
}

CsvForm parse_csv_form(std::string_view name) {
  for (const CsvForm form : {CsvForm::kCompute, CsvForm::kCommunication}) {
    if (csv_form_name(form) == name) return form;
  }
  fail("unknown text form '", name, "': there are ", csv_form_name(CsvForm::kCompute), " and ",
       csv_form_name(CsvForm::kCommunication));
}

std::string to_csv(const Schedule& schedule, CsvForm form) {
  TWOBP_CHECK(schedule.slices == 1, "schedule '", schedule.name, "' has ", schedule.slices,
              " slices for each micro-batch, and PyTorch's text form has no place for them: write one without");
  const Schedule cells = lower(schedule);
  for (int rank = 0; rank < cells.rank_count(); ++rank) {
    TWOBP_CHECK(!cells.ranks[rank].empty(), "schedule '", schedule.name, "': rank ", rank,
                " runs nothing, and a row of the text form cannot be empty: place a stage there, or use ",
                "fewer ranks");
  }
  std::vector<std::string> rows;
  if (form == CsvForm::kCommunication) {
    rows = Rows(cells).run();
  } else {
    for (const auto& list : cells.ranks) {
      rows.emplace_back();
      for (const Instruction& i : list) append(rows.back(), {i});
    }
  }
  std::string text;
  for (std::string& row : rows) {
    text += row;
    text += '\n';
    row = {};
  }
  return text;
}

}  // namespace twobp
