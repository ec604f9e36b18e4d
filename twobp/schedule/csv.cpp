#include "twobp/schedule/csv.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/schedule/check/validate.h"
#include "twobp/schedule/passes.h"

namespace twobp {
namespace {

// F, I (or B) and W of every (stage, micro-batch).
constexpr size_t kCellKinds = 3;

size_t kind_of(Op op) {
  switch (op) {
    case Op::kForward:
      return 0;
    case Op::kBackwardP2:
      return 2;
    default:
      return 1;
  }
}

// The cells of all ranks, as a table of (stage, micro-batch, kind).
class Cells {
 public:
  explicit Cells(const Schedule& schedule) : schedule_(schedule) {
    ops_.assign(static_cast<size_t>(schedule.stages) * schedule.micro_batches * kCellKinds, 0);
    for (const auto& list : schedule.ranks) {
      for (const Instruction& i : list) {
        if (!is_compute(i.op)) continue;
        for (int k = 0; k < i.count; ++k) {
          ops_.at(slot(i.stage, i.micro_batch + k, kind_of(i.op))) = 1 + static_cast<uint8_t>(i.op);
        }
      }
    }
  }

  size_t size() const { return ops_.size(); }
  size_t slot(int stage, int micro_batch, size_t kind) const {
    return (static_cast<size_t>(stage) * schedule_.micro_batches + micro_batch) * kCellKinds + kind;
  }
  bool has(size_t slot) const { return ops_[slot] != 0; }
  Instruction cell(size_t slot) const {
    const size_t pair = slot / kCellKinds;
    return {static_cast<Op>(ops_[slot] - 1), static_cast<int>(pair / schedule_.micro_batches),
            static_cast<int>(pair % schedule_.micro_batches), 1};
  }

  // The cell that a part of an op belongs to. Both halves of a B belong to the cell of the B.
  size_t cell_of(int rank, const RecordedOp& ran) const {
    const auto text = [&] { return to_string({ran.op, ran.stage, ran.micro_batch}); };
    TWOBP_CHECK(is_compute(ran.op) && ran.stage >= 0 && ran.stage < schedule_.stages && ran.micro_batch >= 0 &&
                    ran.micro_batch < schedule_.micro_batches,
                "schedule '", schedule_.name, "' has no ", text(), ", which ran on rank ", rank);
    TWOBP_CHECK(schedule_.rank_of_stage[ran.stage] == rank, text(), " ran on rank ", rank, ", but schedule '",
                schedule_.name, "' places stage ", ran.stage, " on rank ", schedule_.rank_of_stage[ran.stage]);
    const size_t p1 = slot(ran.stage, ran.micro_batch, 1);
    const bool whole = ops_[p1] == 1 + static_cast<uint8_t>(Op::kBackward);
    TWOBP_CHECK(ran.op != Op::kBackward || whole, text(), " ran, but schedule '", schedule_.name,
                "' has a separate I and W in its place");
    const size_t at = whole && ran.op != Op::kForward ? p1 : slot(ran.stage, ran.micro_batch, kind_of(ran.op));
    TWOBP_CHECK(has(at), "schedule '", schedule_.name, "' has no ", text(), ", which ran on rank ", rank);
    return at;
  }

 private:
  const Schedule& schedule_;
  std::vector<uint8_t> ops_;  // 1 + Op; 0: not in the schedule
};

Schedule without_instructions(const Schedule& schedule) {
  Schedule result;
  result.name = schedule.name;
  result.stages = schedule.stages;
  result.micro_batches = schedule.micro_batches;
  result.slices = schedule.slices;
  result.frozen = schedule.frozen;
  result.rank_of_stage = schedule.rank_of_stage;
  result.allow_reorder = schedule.allow_reorder;
  result.policy = schedule.has(Op::kBackwardP2) ? P2Policy::kPlaced : P2Policy::kOff;
  result.ranks.resize(schedule.ranks.size());
  return result;
}

constexpr std::string_view kOverlap = "OVERLAP_F_B";

const std::vector<std::string>& known_ops() {
  static const std::vector<std::string> ops = {"F",      "I",      "W",       "B",       "SEND_F",     "RECV_F",
                                               "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD"};
  return ops;
}

std::optional<Op> compute_op(std::string_view name) {
  for (const Op op : {Op::kForward, Op::kBackwardP1, Op::kBackwardP2, Op::kBackward}) {
    if (op_name(op) == name) return op;
  }
  return std::nullopt;
}

// A cell of unknown origin, for messages.
std::string shown(std::string_view text) {
  constexpr size_t kLongest = 60;
  return printable(text.substr(0, kLongest)) + (text.size() > kLongest ? "..." : "");
}

std::string_view trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

struct CsvPosition {
  int row = 0;     // from 0
  int column = 0;  // from 0
};

class CsvImport {
 public:
  CsvImport(std::string_view text, const std::string& name) : text_(text) { schedule_.name = name; }

  Schedule run() {
    read_rows();
    place_stages();
    schedule_.allow_reorder = true;  // any order that can run: see keeps_order
    prove();
    schedule_.allow_reorder = !keeps_order();
    if (schedule_.has(Op::kBackwardP2)) schedule_.policy = P2Policy::kPlaced;
    return std::move(schedule_);
  }

 private:
  template <typename... Args>
  [[noreturn]] void reject(CsvPosition at, std::string_view cell, const Args&... what) const {
    fail(schedule_.name, ": row ", at.row + 1, " (rank ", at.row, "), column ", at.column + 1, ", cell \"", shown(cell),
         "\": ", what...);
  }
  // Rejects an instruction of the lists.
  template <typename... Args>
  [[noreturn]] void reject_at(int rank, size_t index, const Args&... what) const {
    reject({rank, columns_[rank][index]}, to_string(schedule_.ranks[rank][index]), what...);
  }

  void read_rows() {
    if (text_.starts_with("\xEF\xBB\xBF")) text_.remove_prefix(3);
    TWOBP_CHECK(
        text_.find('\0') == std::string_view::npos && !text_.starts_with("\xFF\xFE") && !text_.starts_with("\xFE\xFF"),
        schedule_.name, ": is not plain text: save it as UTF-8");
    const auto reject_blank = [&](int row) {
      fail(schedule_.name, ": row ", row + 1, " (rank ", row,
           ") has no cells: each row is a rank, in order. Remove blank rows, and ranks that run nothing");
    };
    int blank = -1;  // the first row without text
    for (int row = 0; !text_.empty(); ++row) {
      const size_t end = std::min(text_.find_first_of("\r\n"), text_.size());
      schedule_.ranks.emplace_back();
      columns_.emplace_back();
      int column = 0;
      bool any = false;
      for (const std::string& cell : split(text_.substr(0, end), ',')) any |= add_cell({row, column++}, cell);
      text_.remove_prefix(end);
      text_.remove_prefix(text_.starts_with("\r\n") ? 2 : text_.empty() ? 0 : 1);
      if (any && blank >= 0) reject_blank(blank);
      if (any && schedule_.ranks.back().empty()) reject_blank(row);
      if (any) continue;
      schedule_.ranks.pop_back();
      columns_.pop_back();
      if (blank < 0) blank = row;
    }
    TWOBP_CHECK(!schedule_.ranks.empty(), schedule_.name,
                ": has no cells: a schedule has a row for each rank, such as 0F0,0B0");
  }

  // Returns false for an empty cell.
  bool add_cell(CsvPosition at, std::string_view text) {
    std::string_view cell = trimmed(text);
    if (cell.size() > 1 && cell.front() == '"' && cell.back() == '"') {
      cell = trimmed(cell.substr(1, cell.size() - 2));
    }
    if (cell.empty()) return false;
    if (cell.front() != '(') {
      add_action(at, cell, cell);
      return true;
    }
    const size_t end = cell.find(')');
    if (end == std::string_view::npos) reject(at, cell, "has no closing parenthesis");
    const std::string_view kind = cell.substr(end + 1);
    if (kind != kOverlap) {
      reject(at, cell, "\"", shown(kind), "\" behind the parentheses is unknown: there is ", kOverlap);
    }
    for (const std::string& action : split(cell.substr(1, end - 1), ';')) {
      add_action(at, cell, trimmed(action));
    }
    return true;
  }

  void add_action(CsvPosition at, std::string_view cell, std::string_view text) {
    const char* const end = text.data() + text.size();
    int stage = 0;
    const char* next = number(at, cell, text.data(), end, "stage", stage);
    if (next == text.data()) {
      reject(at, cell, "does not begin with the number of a stage: a cell is stage, op, micro-batch, as in 0F0",
             text.find(';') != std::string_view::npos ? ". Put commas between cells, not semicolons" : "");
    }
    const char* const digits = std::find_if(next, end, [](char c) { return c >= '0' && c <= '9'; });
    const std::string name(next, digits);
    if (std::find(known_ops().begin(), known_ops().end(), name) == known_ops().end()) {
      reject(at, cell, "unknown op \"", shown(name), "\": did you mean \"", nearest(shown(name), known_ops()),
             "\"? There are ", join(known_ops()));
    }
    int micro_batch = 0;
    const char* const rest = number(at, cell, digits, end, "micro-batch", micro_batch);
    if (rest != end) {
      reject(at, cell, "\"", shown({rest, static_cast<size_t>(end - rest)}),
             "\" behind the micro-batch: put a comma between cells");
    }
    const std::optional<Op> op = compute_op(name);
    if (!op) return;
    if (digits == end) reject(at, cell, "names no micro-batch: write ", text, "0");
    schedule_.ranks.back().push_back({*op, stage, micro_batch, 1});
    columns_.back().push_back(at.column);
  }

  // Parses digits, if there are any. Returns the position after them.
  const char* number(CsvPosition at, std::string_view cell, const char* begin, const char* end, std::string_view what,
                     int& value) const {
    if (begin == end || *begin < '0' || *begin > '9') return begin;
    const auto [next, error] = std::from_chars(begin, end, value);
    if (error != std::errc() || value == INT32_MAX) {  // the number of them must fit, too
      reject(at, cell, "the number of its ", what, " is too large: ", what, " numbers are counted from 0");
    }
    return next;
  }

  void place_stages() {
    struct Seen {
      int rank = -1;
      size_t index = 0;
    };
    size_t cells = 0;
    Seen last_stage, last_micro_batch;
    schedule_.stages = schedule_.micro_batches = 0;
    for (int rank = 0; rank < schedule_.rank_count(); ++rank) {
      const auto& list = schedule_.ranks[rank];
      cells += list.size();
      for (size_t i = 0; i < list.size(); ++i) {
        if (list[i].stage >= schedule_.stages) {
          schedule_.stages = list[i].stage + 1;
          last_stage = {rank, i};
        }
        if (list[i].micro_batch < schedule_.micro_batches) continue;
        schedule_.micro_batches = list[i].micro_batch + 1;
        last_micro_batch = {rank, i};
      }
    }
    // Before anything is allocated that grows with the numbers: each pair needs at least its F.
    if (static_cast<uint64_t>(schedule_.stages) * static_cast<uint64_t>(schedule_.micro_batches) > cells) {
      const Seen& at = schedule_.stages > schedule_.micro_batches ? last_stage : last_micro_batch;
      reject_at(at.rank, at.index, "there are ", schedule_.stages, " stages and ", schedule_.micro_batches,
                " micro-batches, but too few cells (", cells,
                ") for every stage to have every micro-batch: both are numbered from 0 without gaps");
    }
    std::vector<Seen> first(schedule_.stages);
    for (int rank = 0; rank < schedule_.rank_count(); ++rank) {
      for (size_t i = 0; i < schedule_.ranks[rank].size(); ++i) {
        Seen& seen = first[schedule_.ranks[rank][i].stage];
        if (seen.rank < 0) seen = {rank, i};
        if (seen.rank == rank) continue;
        reject_at(rank, i, "stage ", schedule_.ranks[rank][i].stage, " is on rank ", seen.rank, " already, by ",
                  to_string(schedule_.ranks[seen.rank][seen.index]), " in row ", seen.rank + 1, ", column ",
                  columns_[seen.rank][seen.index] + 1, ": all cells of a stage stand in one row");
      }
    }
    for (size_t stage = 0; stage < first.size(); ++stage) {
      if (first[stage].rank < 0) {
        reject_at(last_stage.rank, last_stage.index, "there is no stage ", stage,
                  ": stages are numbered from 0 without gaps");
      }
      schedule_.rank_of_stage.push_back(first[stage].rank);
    }
  }

  void prove() const {
    const Schedule whole = add_communication(schedule_);
    try {
      validate(whole);
    } catch (const InvalidSchedule& error) {
      if (error.rank < 0) fail(schedule_.name, ": ", error.what());
      // The cell of an added message is that of the op after a receive or before a send.
      const auto& list = whole.ranks[error.rank];
      const auto cells = static_cast<size_t>(std::count_if(list.begin(), list.begin() + error.index,
                                                           [](const Instruction& i) { return is_compute(i.op); }));
      const Op op = list[error.index].op;
      reject_at(error.rank, is_compute(op) || is_receive(op) ? cells : cells - 1, error.what());
    }
  }

  // Whether F, I and W of each stage run in micro-batch order. They do unless a schedule was built otherwise.
  bool keeps_order() const {
    std::vector<int> forward(schedule_.stages, -1), p1 = forward, p2 = forward;
    const auto follows = [](int& last, int m) { return std::exchange(last, m) < m; };
    for (const auto& list : schedule_.ranks) {
      for (const Instruction& i : list) {
        const bool both = i.op == Op::kBackward;
        if (i.op == Op::kForward && !follows(forward[i.stage], i.micro_batch)) return false;
        if ((both || i.op == Op::kBackwardP1) && !follows(p1[i.stage], i.micro_batch)) return false;
        if ((both || i.op == Op::kBackwardP2) && !follows(p2[i.stage], i.micro_batch)) return false;
      }
    }
    return true;
  }

  std::string_view text_;
  Schedule schedule_;
  std::vector<std::vector<int>> columns_;  // of each instruction
};

}  // namespace

Schedule lower(const Schedule& schedule) {
  TWOBP_CHECK(!schedule.fills(), "schedule '", schedule.name,
              "' has p2 fill: its W get their places only in a run, so it has no cells yet. Lower it in a simulated "
              "or a recorded order, or choose p2 off, end, cooldown or placed");
  Schedule result = without_instructions(schedule);
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    for (const Instruction& i : schedule.ranks[rank]) {
      if (!is_compute(i.op)) continue;
      for (int k = 0; k < i.count; ++k) result.ranks[rank].push_back({i.op, i.stage, i.micro_batch + k, 1});
    }
  }
  return result;
}

Schedule lower(const Schedule& schedule, const std::vector<std::vector<RecordedOp>>& ran) {
  TWOBP_CHECK(ran.size() == schedule.ranks.size(), "the order has ", ran.size(), " ranks, but schedule '",
              schedule.name, "' has ", schedule.ranks.size());
  const Cells cells(schedule);
  constexpr size_t kNever = SIZE_MAX;
  std::vector<size_t> last(cells.size(), kNever);
  for (size_t rank = 0; rank < ran.size(); ++rank) {
    for (size_t i = 0; i < ran[rank].size(); ++i) {
      last[cells.cell_of(static_cast<int>(rank), ran[rank][i])] = i;
    }
  }
  for (size_t slot = 0; slot < cells.size(); ++slot) {
    TWOBP_CHECK(!cells.has(slot) || last[slot] != kNever, to_string(cells.cell(slot)), " of schedule '", schedule.name,
                "' never ran: the order must have every op of the step");
  }
  Schedule result = without_instructions(schedule);
  for (size_t rank = 0; rank < ran.size(); ++rank) {
    for (size_t i = 0; i < ran[rank].size(); ++i) {
      const size_t slot = cells.cell_of(static_cast<int>(rank), ran[rank][i]);
      if (last[slot] == i) result.ranks[rank].push_back(cells.cell(slot));
    }
  }
  return result;
}

Schedule lower(const Schedule& schedule, const Simulation& simulation) {
  return lower(schedule, recorded_order(simulation));
}

std::string to_csv(const Schedule& schedule) {
  TWOBP_CHECK(schedule.slices == 1, "schedule '", schedule.name, "' has ", schedule.slices,
              " slices for each micro-batch, and PyTorch's text form has no place for them: write one without");
  const Schedule cells = lower(schedule);
  std::string text;
  for (int rank = 0; rank < cells.rank_count(); ++rank) {
    TWOBP_CHECK(!cells.ranks[rank].empty(), "schedule '", schedule.name, "': rank ", rank,
                " runs nothing, and a row of the text form cannot be empty: place a stage there, or use ",
                "fewer ranks");
    for (const Instruction& i : cells.ranks[rank]) {
      text += to_string(i);
      text += ',';
    }
    text.back() = '\n';
  }
  return text;
}

Schedule from_csv(const std::string& text, const std::string& name) {
  return CsvImport(text, name).run();
}

Schedule read_csv(const std::string& path) {
  constexpr uint64_t kMostBytes = uint64_t{1} << 30U;
  return from_csv(read_text(path, kMostBytes), path);
}

}  // namespace twobp
