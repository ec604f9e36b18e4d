// Reading the text form: turns cells into instructions, derives the placement from the rows, and proves that the result
// is a schedule.
#include <algorithm>
#include <charconv>
#include <limits>
#include <optional>
#include <sstream>
#include <utility>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/schedule/check/validate.h"
#include "twobp/schedule/passes.h"
#include "twobp/schedule/text/csv.h"
#include "twobp/schedule/text/csv_cells.h"

namespace twobp {
namespace {

constexpr int kHighest = std::numeric_limits<int>::max() - 1;  // so that the number of them fits, too
constexpr std::string_view kOverlap = "OVERLAP_F_B";

const std::vector<std::string>& known_ops() {
  static const std::vector<std::string> ops = {"F",      "I",      "W",       "B",       "SEND_F",     "RECV_F",
                                               "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD"};
  return ops;
}

// PyTorch's ops that have no counterpart in a schedule here.
bool is_passed_over(std::string_view op) {
  return op == "UNSHARD" || op == "RESHARD" || op == "REDUCE_GRAD";
}

std::optional<Op> op_of(std::string_view name) {
  for (const Op op : {Op::kForward, Op::kBackwardP1, Op::kBackwardP2, Op::kBackward, Op::kSendForward, Op::kRecvForward,
                      Op::kSendBackward, Op::kRecvBackward}) {
    if (op_name(op) == name) return op;
  }
  return std::nullopt;
}

// A cell of unknown origin, for messages: short, and without control characters.
std::string shown(std::string_view text) {
  constexpr size_t kLongest = 60;
  std::string out;
  for (const char c : text.substr(0, kLongest)) {
    const bool control = static_cast<unsigned char>(c) < 0x20 || c == 0x7F;
    out += control ? '?' : c;
  }
  return text.size() > kLongest ? out + "..." : out;
}

class CsvImport {
 public:
  CsvImport(std::istream& in, const std::string& name) : in_(in) { schedule_.name = name; }

  Schedule run() {
    read_csv_cells(in_, schedule_.name, [&](CsvPosition at, const std::string& text) { add_cell(at, text); });
    TWOBP_CHECK(!in_.bad(), schedule_.name, ": cannot be read to its end: input error");
    check_rows();
    place_stages();
    check_forwards();
    prove();
    for (auto& list : schedule_.ranks) {
      std::erase_if(list, [](const Instruction& i) { return !is_compute(i.op); });
    }
    schedule_.allow_reorder = !keeps_order();
    return std::move(schedule_);
  }

 private:
  template <typename... Args>
  [[noreturn]] void reject(CsvPosition at, std::string_view cell, const Args&... what) const {
    fail(csv_place(schedule_.name, at), ", cell \"", shown(cell), "\": ", what...);
  }
  // The place of an instruction in the lists.
  CsvPosition place(int rank, size_t index) const { return {rank, columns_[rank][index]}; }
  template <typename... Args>
  [[noreturn]] void reject_at(int rank, size_t index, const Args&... what) const {
    reject(place(rank, index), to_string(schedule_.ranks[rank][index]), what...);
  }

  void add_cell(CsvPosition at, const std::string& text) {
    if (at.row > schedule_.rank_count()) reject_blank(schedule_.ranks.size());
    if (at.row == schedule_.rank_count()) {
      schedule_.ranks.emplace_back();
      columns_.emplace_back();
    }
    if (text.front() != '(') return add_action(at, text, text, false);
    const size_t end = text.find(')');
    if (end == std::string::npos) reject(at, text, "has no closing parenthesis");
    const std::string kind = text.substr(end + 1);
    if (kind != kOverlap) {
      reject(at, text, "\"", shown(kind), "\" behind the parentheses is unknown: there is ", kOverlap);
    }
    for (std::string action : split(text.substr(1, end - 1), ';')) {
      action.erase(0, action.find_first_not_of(' '));
      action.erase(action.find_last_not_of(' ') + 1);
      add_action(at, text, action, true);
    }
  }

  void add_action(CsvPosition at, const std::string& cell, std::string_view text, bool overlapped) {
    const char* const end = text.data() + text.size();
    int stage = 0;
    const char* next = number(at, cell, text.data(), end, "stage", stage);
    if (next == text.data()) {
      reject(at, cell, "does not begin with the number of a stage: a cell is stage, op, micro-batch, as in 0F0",
             text.find(';') != std::string_view::npos ? ". Put commas between cells, not semicolons" : "");
    }
    const char* const digits = std::find_if(next, end, [](char c) { return c >= '0' && c <= '9'; });
    const std::string_view name(next, static_cast<size_t>(digits - next));
    const std::optional<Op> op = op_of(name);
    if (!op && !is_passed_over(name)) {
      reject(at, cell, "unknown op \"", shown(name), "\": did you mean \"", nearest(shown(name), known_ops()),
             "\"? There are ", join(known_ops()));
    }
    int micro_batch = 0;
    const char* const rest = number(at, cell, digits, end, "micro-batch", micro_batch);
    if (rest != end) {
      reject(at, cell, "\"", shown({rest, static_cast<size_t>(end - rest)}),
             "\" behind the micro-batch: put a comma between cells");
    }
    if (!op) return;
    if (digits == end) reject(at, cell, "names no micro-batch: write ", text, "0");
    if (overlapped && !is_compute(*op)) reject(at, cell, text, " is a message, and ", kOverlap, " holds none");
    schedule_.ranks[at.row].push_back({*op, stage, micro_batch, 1});
    columns_[at.row].push_back(at.column);
    has_messages_ |= !is_compute(*op);
  }

  // Parses digits, if there are any. Returns the position after them.
  const char* number(CsvPosition at, const std::string& cell, const char* begin, const char* end, std::string_view what,
                     int& value) const {
    if (begin == end || *begin < '0' || *begin > '9') return begin;
    const auto [next, error] = std::from_chars(begin, end, value);
    if (error != std::errc() || value > kHighest) {
      reject(at, cell, "the number of its ", what, " is too large: ", what, " numbers are counted from 0");
    }
    return next;
  }

  [[noreturn]] void reject_blank(size_t row) const {
    fail(schedule_.name, ": row ", row + 1, " (rank ", row,
         ") has no cells: each row is a rank, in order. Remove blank rows, and ranks that run nothing");
  }

  void check_rows() const {
    TWOBP_CHECK(!schedule_.ranks.empty(), schedule_.name,
                ": has no cells: a schedule has a row for each rank, such as 0F0,0B0");
    for (size_t rank = 0; rank < schedule_.ranks.size(); ++rank) {
      if (schedule_.ranks[rank].empty()) reject_blank(rank);
    }
  }

  void place_stages() {
    struct Seen {
      int rank = -1;
      size_t index = 0;
    };
    size_t cells = 0;
    for (const auto& list : schedule_.ranks) cells += list.size();
    std::vector<Seen> first;
    Seen highest;
    for (int rank = 0; rank < schedule_.rank_count(); ++rank) {
      const auto& list = schedule_.ranks[rank];
      for (size_t i = 0; i < list.size(); ++i) {
        const auto stage = static_cast<size_t>(list[i].stage);
        if (stage >= cells) {
          reject_at(rank, i, "stage ", stage, " in a file of ", cells,
                    " cells leaves stages out: they are numbered from 0 without gaps");
        }
        if (stage >= first.size()) {
          first.resize(stage + 1);
          highest = {rank, i};
        }
        Seen& seen = first[stage];
        if (seen.rank < 0) seen = {rank, i};
        if (seen.rank != rank) {
          const CsvPosition other = place(seen.rank, seen.index);
          reject_at(rank, i, "stage ", stage, " is on rank ", seen.rank, " already, by ",
                    to_string(schedule_.ranks[seen.rank][seen.index]), " in row ", other.row + 1, ", column ",
                    other.column + 1, ": all cells of a stage stand in one row");
        }
      }
    }
    for (size_t stage = 0; stage < first.size(); ++stage) {
      if (first[stage].rank < 0) {
        reject_at(highest.rank, highest.index, "there is no stage ", stage,
                  ": stages are numbered from 0 without gaps");
      }
      schedule_.rank_of_stage.push_back(first[stage].rank);
    }
    schedule_.stages = static_cast<int>(first.size());
  }

  // Checks that every F exists, before anything is allocated that grows with the highest micro-batch.
  void check_forwards() {
    std::vector<std::vector<int>> forwards(schedule_.stages);
    int highest_rank = 0;
    size_t highest_index = 0;
    int highest = -1;
    for (int rank = 0; rank < schedule_.rank_count(); ++rank) {
      const auto& list = schedule_.ranks[rank];
      for (size_t i = 0; i < list.size(); ++i) {
        if (list[i].op == Op::kForward) forwards[list[i].stage].push_back(list[i].micro_batch);
        if (list[i].micro_batch <= highest) continue;
        highest = list[i].micro_batch;
        highest_rank = rank;
        highest_index = i;
      }
    }
    schedule_.micro_batches = highest + 1;
    for (int stage = 0; stage < schedule_.stages; ++stage) {
      auto& list = forwards[stage];
      std::sort(list.begin(), list.end());
      list.erase(std::unique(list.begin(), list.end()), list.end());
      if (std::cmp_equal(list.size(), schedule_.micro_batches)) continue;
      int missing = 0;
      while (std::cmp_less(missing, list.size()) && list[missing] == missing) ++missing;
      reject_at(highest_rank, highest_index, "there are micro-batches up to ", highest, ", but row ",
                schedule_.rank_of_stage[stage] + 1, " lacks ", to_string({Op::kForward, stage, missing, 1}),
                ": every stage has every micro-batch, numbered from 0 without gaps");
    }
  }

  // Accepts any order of micro-batches that can run: see keeps_order.
  void prove() {
    schedule_.allow_reorder = true;
    std::vector<std::vector<size_t>> origins;  // the cell of each instruction
    const Schedule proved = has_messages_ ? with_receives_at_ops(origins) : with_messages(origins);
    try {
      validate(proved);
    } catch (const InvalidSchedule& error) {
      if (error.rank < 0) fail(schedule_.name, ": ", error.what());
      reject_at(error.rank, origins[error.rank][error.index], error.what());
    }
  }

  // A message that add_communication adds belongs to the op after a receive or before a send.
  Schedule with_messages(std::vector<std::vector<size_t>>& origins) const {
    Schedule result = add_communication(schedule_);
    for (const auto& list : result.ranks) {
      auto& of_rank = origins.emplace_back();
      size_t cells = 0;
      for (const Instruction& i : list) {
        const bool send = !is_compute(i.op) && !is_receive(i.op);
        of_rank.push_back(send ? cells - 1 : cells);
        if (is_compute(i.op)) ++cells;
      }
    }
    return result;
  }

  // A receive in a file is posted at its cell, and waits at its op. A receive without an op after it stays.
  Schedule with_receives_at_ops(std::vector<std::vector<size_t>>& origins) const {
    Schedule result = schedule_;
    // Per (stage, micro-batch): 1 + the index of a posted receive that no op has taken yet.
    const size_t slots = static_cast<size_t>(schedule_.stages) * schedule_.micro_batches;
    std::vector<size_t> forward(slots, 0);
    std::vector<size_t> backward(slots, 0);
    for (int rank = 0; rank < schedule_.rank_count(); ++rank) {
      const auto& list = schedule_.ranks[rank];
      auto& of_rank = origins.emplace_back();
      for (size_t i = 0; i < list.size(); ++i) {
        const size_t slot = static_cast<size_t>(list[i].stage) * schedule_.micro_batches + list[i].micro_batch;
        auto& posted = list[i].op == Op::kForward || list[i].op == Op::kRecvForward ? forward : backward;
        if (is_receive(list[i].op)) {
          if (posted[slot] != 0) of_rank.push_back(posted[slot] - 1);  // posted twice; validate names it
          posted[slot] = i + 1;
          continue;
        }
        const bool takes = is_compute(list[i].op) && list[i].op != Op::kBackwardP2;
        if (takes && posted[slot] != 0) of_rank.push_back(std::exchange(posted[slot], 0) - 1);
        of_rank.push_back(i);
      }
      for (size_t i = 0; i < list.size(); ++i) {
        const size_t slot = static_cast<size_t>(list[i].stage) * schedule_.micro_batches + list[i].micro_batch;
        auto& posted = list[i].op == Op::kRecvForward ? forward : backward;
        if (is_receive(list[i].op) && posted[slot] == i + 1) of_rank.push_back(i);
      }
      std::transform(of_rank.begin(), of_rank.end(), result.ranks[rank].begin(),
                     [&](size_t origin) { return list[origin]; });
    }
    return result;
  }

  // Whether F, I and W of each stage run in micro-batch order. They do unless a schedule was built otherwise.
  bool keeps_order() const {
    std::vector<int> forward(schedule_.stages, -1);
    std::vector<int> p1(schedule_.stages, -1);
    std::vector<int> p2(schedule_.stages, -1);
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

  std::istream& in_;
  Schedule schedule_;
  std::vector<std::vector<int>> columns_;  // of each instruction
  bool has_messages_ = false;
};

}  // namespace

Schedule from_csv(std::istream& in, const std::string& name) {
  Schedule schedule = CsvImport(in, name).run();
  for (const auto& list : schedule.ranks) {
    for (const Instruction& i : list) {
      if (i.op == Op::kBackwardP2) schedule.policy = P2Policy::kPlaced;
    }
  }
  return schedule;
}

Schedule from_csv(const std::string& text, const std::string& name) {
  std::istringstream in(text);
  return from_csv(in, name);
}

Schedule read_csv(const std::string& path) {
  constexpr uint64_t kMostBytes = uint64_t{1} << 30U;
  return from_csv(read_text(path, kMostBytes), path);
}

}  // namespace twobp
