// Draws schedules: the simulated timeline to scale, and the bare instruction lists for error messages.
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp {
namespace {

constexpr double kMostCells = 2e7;

// Only this many ranks around a mark of a big schedule are shown.
constexpr int kRanksAround = 8;
constexpr int kCellsAround = 12;

std::string rank_label(int rank, int ranks) {
  const size_t width = std::to_string(ranks - 1).size();
  std::string number = std::to_string(rank);
  return "rank " + std::string(width - std::min(width, number.size()), ' ') + number + "  ";
}

void strip_trailing_spaces(std::string& line) {
  line.erase(line.find_last_not_of(' ') + 1);
}

// The content of a row from column `begin` to `end`.
struct Span {
  long begin = 0;
  long end = 0;
  std::string label;
};

class TimelineGrid {
 public:
  TimelineGrid(const Schedule& schedule, const Simulation& simulation, double unit, int max_width)
      : max_width_(max_width), unit_(unit), step_(simulation.step_seconds) {
    TWOBP_CHECK(std::isfinite(unit) && unit > 0, "the unit of a grid must be above 0, got ", unit);
    TWOBP_CHECK(simulation.ranks.size() == schedule.ranks.size(), "the simulation has ", simulation.ranks.size(),
                " ranks, the schedule ", schedule.ranks.size());
    const double ranks = static_cast<double>(schedule.ranks.size());
    TWOBP_CHECK(simulation.step_seconds / unit * ranks <= kMostCells, "a grid of ", simulation.step_seconds / unit,
                " columns is too large to draw: choose a larger unit than ", unit);
    slices_ = schedule.slices;
    several_stages_a_rank_ = schedule.stages > schedule.rank_count();
    columns_ = column(simulation.step_seconds);
    for (const auto& rank : simulation.ranks) add_row(rank);
    for (const auto& row : rows_) {
      for (const auto& span : row) width_ = std::max(width_, span.label.size());
    }
  }

  std::string draw() const {
    const int ranks = static_cast<int>(rows_.size());
    const auto cell = static_cast<long>(width_) + 1;
    long panel = std::max(columns_, 1L);
    if (max_width_ > 0 && ranks > 0) {
      const long room = max_width_ - static_cast<long>(rank_label(0, ranks).size());
      panel = std::clamp(room / cell, 1L, panel);
    }
    std::vector<size_t> next(rows_.size(), 0);  // the first span of each row that is not drawn to its end
    std::string out;
    for (long begin = 0; begin < std::max(columns_, 1L); begin += panel) {
      if (begin > 0) out += '\n';
      for (int rank = 0; rank < ranks; ++rank) {
        std::string line = rank_label(rank, ranks);
        draw_row(rows_[rank], begin, std::min(begin + panel, columns_), next[rank], line);
        strip_trailing_spaces(line);
        out += line;
        out += '\n';
      }
    }
    return out;
  }

 private:
  long column(double time) const { return std::lround(time / unit_); }

  void add_row(const RankSimulation& rank) {
    std::vector<Span> row;
    double busy = 0;
    const auto add = [&](double begin, double end, std::string label) {
      busy += end - begin;
      // Pushed to the right if ops shorter than a cell have taken more than their time.
      const long from = std::max(column(begin), row.empty() ? 0 : row.back().end);
      row.push_back({from, std::max(from + 1, column(end)), std::move(label)});
    };
    for (const auto& op : rank.timeline) {
      std::string label = several_stages_a_rank_ ? std::to_string(op.stage) : "";
      label += op_name(op.op);
      label += micro_batch_name(op.micro_batch, slices_);
      add(op.begin, op.end, std::move(label));
    }
    // The optimizer is the busy time after the last op, before the tail.
    const double optimizer = rank.busy - busy;
    const double end = step_ - rank.idle[static_cast<size_t>(IdleCause::kTail)];
    if (optimizer > 1e-9 * rank.busy) add(end - optimizer, end, "O");
    if (!row.empty()) columns_ = std::max(columns_, row.back().end);
    rows_.push_back(std::move(row));
  }

  void draw_row(const std::vector<Span>& row, long begin, long end, size_t& next, std::string& line) const {
    for (long at = begin; at < end;) {
      while (next < row.size() && row[next].end <= at) ++next;
      const bool busy = next < row.size() && row[next].begin <= at;
      const long stop = busy ? std::min(row[next].end, end) : next < row.size() ? std::min(row[next].begin, end) : end;
      if (busy) {
        draw_op(row[next], at, stop, line);
      } else {
        draw_idle(stop - at, line);
      }
      at = stop;
    }
  }

  void draw_op(const Span& span, long from, long to, std::string& line) const {
    const size_t room = static_cast<size_t>(to - from) * (width_ + 1) - 1;
    const bool long_op = span.end - span.begin > 1;
    std::string text = from == span.begin ? span.label : "";
    text.resize(room, long_op ? '-' : ' ');
    line += text;
    line += ' ';
  }

  void draw_idle(long cells, std::string& line) const {
    for (long i = 0; i < cells; ++i) line += '.' + std::string(width_, ' ');
  }

  int max_width_;
  double unit_;
  double step_;
  bool several_stages_a_rank_ = false;
  int slices_ = 1;
  long columns_ = 0;
  size_t width_ = 1;
  std::vector<std::vector<Span>> rows_;
};

}  // namespace

std::string draw_grid(const Schedule& schedule, const Simulation& simulation, double unit, int max_width) {
  return TimelineGrid(schedule, simulation, unit, max_width).draw();
}

std::string draw_instructions(const Schedule& schedule, int marked_rank, int marked_index) {
  const int ranks = schedule.rank_count();
  size_t longest = 0;
  for (const auto& list : schedule.ranks) longest = std::max(longest, list.size());
  int first_rank = 0;
  int last_rank = ranks;
  size_t first = 0;
  size_t last = longest;
  if (marked_rank >= 0) {
    if (ranks > 2 * kRanksAround) {
      first_rank = std::max(0, marked_rank - kRanksAround);
      last_rank = std::min(ranks, marked_rank + kRanksAround + 1);
    }
    if (longest > 4 * static_cast<size_t>(kCellsAround)) {
      first = static_cast<size_t>(std::max(0, marked_index - kCellsAround));
      last = std::min(longest, static_cast<size_t>(marked_index) + kCellsAround + 1);
    }
  }

  std::vector<std::string> lines;
  for (int rank = first_rank; rank < last_rank; ++rank) {
    lines.push_back(rank_label(rank, ranks) + (first > 0 ? "... " : ""));
  }
  for (size_t i = first; i < last; ++i) {
    std::vector<std::string> column(lines.size());
    size_t width = 0;
    for (int rank = first_rank; rank < last_rank; ++rank) {
      const auto& list = schedule.ranks[rank];
      if (i >= list.size()) continue;
      std::string& text = column[rank - first_rank];
      text = to_string(list[i], schedule.slices);
      if (rank == marked_rank && static_cast<int>(i) == marked_index) text = ">" + text + "<";
      width = std::max(width, text.size());
    }
    for (size_t row = 0; row < lines.size(); ++row) {
      lines[row] += column[row] + std::string(width + 1 - column[row].size(), ' ');
    }
  }

  std::string out;
  if (first_rank > 0) out += "...\n";
  for (size_t row = 0; row < lines.size(); ++row) {
    std::string& line = lines[row];
    if (last < schedule.ranks[first_rank + row].size()) line += "...";
    strip_trailing_spaces(line);
    out += line + '\n';
  }
  if (last_rank < ranks) out += "...\n";
  return out;
}

}  // namespace twobp
