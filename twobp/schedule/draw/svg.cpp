// Rectangles and numbers are grouped by colour, and colours are attributes. Every SVG reader understands
// this, and the files stay small.
#include "twobp/schedule/draw/svg.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/core/text.h"

namespace twobp {
namespace {

constexpr size_t kMostOps = 200000;
constexpr double kTallestRows = 3600;  // pixels, all rows together
constexpr double kRow = 32;            // a row and the gap below it
constexpr double kBar = 0.8;           // the part of it that the bar fills
constexpr double kMargin = 16;
constexpr double kText = 13;
constexpr double kNumber = 11;
constexpr double kDigit = 0.6;  // width of a digit relative to the font size; few fonts have wider ones

enum Kind : int { kF, kI, kW, kOptimizer, kIdle, kKinds };
constexpr std::array<const char*, kKinds> kFills = {"#0072b2", "#e69f00", "#009e73", "#cc79a7", "#e4e5e8"};
constexpr std::array<const char*, kKinds> kNames = {"F: forward", "I: backward, dL/dx", "W: backward, dL/dw",
                                                    "optimizer", "idle"};

Kind picture_kind(Op op) {
  switch (op) {
    case Op::kForward:
      return kF;
    case Op::kBackwardP1:
      return kI;
    case Op::kBackwardP2:
      return kW;
    default:
      fail("a simulated timeline holds F, I and W, not ", op_name(op));
  }
}

std::string pixels(double value) {
  return fixed(value, 1);
}

// Without characters that XML 1.0 forbids.
std::string escaped(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const Character at = first_character(text);
    const bool control = at.code < 0x20 && at.code != '\t' && at.code != '\n' && at.code != '\r';
    if (at.bytes == 0 || control || at.code == 0xfffe || at.code == 0xffff) {
      out += "\xef\xbf\xbd";  // the replacement character
    } else if (at.code == '&' || at.code == '<' || at.code == '>') {
      out += at.code == '&' ? "&amp;" : at.code == '<' ? "&lt;" : "&gt;";
    } else {
      out += text.substr(0, at.bytes);
    }
    text.remove_prefix(std::max<size_t>(at.bytes, 1));
  }
  return out;
}

std::string rect(double x, double y, double width, double height) {
  return concat("<rect x=\"", pixels(x), "\" y=\"", pixels(y), "\" width=\"", pixels(width), "\" height=\"",
                pixels(height), "\"/>\n");
}

std::string label(double x, double y, std::string_view text) {
  return concat("<text x=\"", pixels(x), "\" y=\"", pixels(y), "\">", text, "</text>\n");
}

// The smallest 1, 2 or 5 times a power of ten of which `span` has at most `most`.
double nice_step(double span, double most) {
  const double power = std::pow(10, std::floor(std::log10(span / most)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= span / most) return factor * power;
  }
  return 10 * power;
}

class Picture {
 public:
  Picture(const Schedule& schedule, const Simulation& simulation, const SvgOptions& options)
      : schedule_(schedule), simulation_(simulation), options_(options) {
    check();
    std::vector<int> stages_of_rank(schedule.ranks.size(), 0);
    for (const int rank : schedule.rank_of_stage) {
      chunk_of_stage_.push_back(stages_of_rank[rank]++);
      chunks_ = std::max(chunks_, stages_of_rank[rank]);
    }
    const int ranks = schedule.rank_count();
    pitch_ = std::min(kRow, kTallestRows / std::max(ranks, 1));
    left_ = kMargin + (6 + static_cast<double>(std::to_string(ranks - 1).size())) * kText * kDigit;
    right_ = options.width - kMargin - 10 * kText * kDigit;
    top_ = kMargin + (options.title.empty() ? 0 : 30);
    until_ = std::max(simulation.step_seconds, options.until);
    scale_ = until_ > 0 ? (right_ - left_) / until_ : 0;
  }

  std::string draw() {
    std::string names;
    for (int rank = 0; rank < schedule_.rank_count(); ++rank) names += add_row(rank);
    const double bottom = top_ + pitch_ * schedule_.rank_count();
    const std::string axis = draw_axis(bottom);
    const std::string legend = draw_legend(bottom + 40);
    const double height = bottom + 54 + kMargin;
    std::string out = concat("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"", options_.width, "\" height=\"",
                             pixels(height), "\" viewBox=\"0 0 ", options_.width, ' ', pixels(height),
                             "\" font-family=\"Helvetica, Arial, 'Liberation ", "Sans', sans-serif\" font-size=\"",
                             kText, "\" fill=\"#1d2126\" role=\"img\">\n");
    const std::string title = options_.title.empty() ? "Schedule " + schedule_.name : options_.title;
    out += concat("<title>", escaped(title), "</title>\n<desc>", escaped(description()), "</desc>\n");
    out += concat("<g fill=\"#ffffff\">", rect(0, 0, options_.width, height), "</g>\n");
    if (!options_.title.empty()) {
      out +=
          concat("<g font-size=\"16\" font-weight=\"bold\">", label(kMargin, kMargin + 14, escaped(title)), "</g>\n");
    }
    for (const auto& [fill, bars] : bars_) out += concat("<g fill=\"", fill.second, "\">\n", bars, "</g>\n");
    for (const auto& [fill, numbers] : numbers_) {
      out += concat("<g fill=\"", fill, "\" font-size=\"", kNumber, "\" text-anchor=\"middle\">\n", numbers, "</g>\n");
    }
    return out + axis + names + legend + "</svg>\n";
  }

 private:
  void check() const {
    TWOBP_CHECK(simulation_.ranks.size() == schedule_.ranks.size(), "the simulation has ", simulation_.ranks.size(),
                " ranks, the schedule ", schedule_.ranks.size());
    TWOBP_CHECK(std::isfinite(options_.until) && options_.until >= 0, "an SVG's time axis cannot end at ",
                options_.until);
    TWOBP_CHECK(options_.width >= 300 && options_.width <= 20000, "the width of an SVG must be 300 to 20000, got ",
                options_.width);
    size_t ops = 0;
    for (const auto& rank : simulation_.ranks) ops += rank.timeline.size();
    TWOBP_CHECK(ops > 0 || simulation_.step_seconds <= 0, "the simulation has no timeline to draw: simulate with one");
    TWOBP_CHECK(ops <= kMostOps, "a picture of ", ops, " ops is too large: draw fewer ranks or micro-batches, at most ",
                kMostOps, " ops");
  }

  std::string description() const {
    return concat(schedule_.name, " with p2 ", policy_name(schedule_.policy), ": ", schedule_.stages, " stages on ",
                  schedule_.rank_count(), " ranks, ", schedule_.count_text(), "; the ranks are idle for ",
                  percent(simulation_.bubble_ratio()), " of the step on average");
  }

  // Returns the texts beside the row.
  std::string add_row(int rank) {
    const RankSimulation& result = simulation_.ranks[rank];
    const double y = top_ + pitch_ * rank;
    bars_[{kIdle - kKinds, kFills[kIdle]}] += rect(left_, y, simulation_.step_seconds * scale_, kBar * pitch_);
    double busy = 0;
    for (const SimulatedOp& op : result.timeline) {
      add_bar(picture_kind(op.op), chunk_of_stage_[op.stage], op.begin, op.end, y,
              micro_batch_name(op.micro_batch, schedule_.slices));
      busy += op.end - op.begin;
    }
    // The optimizer is the busy time after the last op, before the tail.
    const double optimizer = result.busy - busy;
    if (optimizer > 1e-9 * result.busy) {
      const double end = simulation_.step_seconds - result.idle[static_cast<size_t>(IdleCause::kTail)];
      add_bar(kOptimizer, 0, end - optimizer, end, y, "");
      has_optimizer_ = true;
    }
    const int every = std::max(1, static_cast<int>(std::ceil((kText + 2) / pitch_)));
    if (rank % every != 0) return "";
    const double baseline = y + kBar * pitch_ / 2 + kText * 0.36;
    return label(kMargin, baseline, concat("rank ", rank)) +
           label(right_ + 8, baseline, concat("idle ", percent(simulation_.idle_fraction(rank))));
  }

  // Up to 55 % white for the last of a rank's stages.
  double opacity(int chunk) const { return chunks_ > 1 ? 1 - 0.55 * chunk / (chunks_ - 1) : 1; }
  std::string fill(Kind kind, int chunk) const {
    return chunk == 0 ? kFills[kind] : concat(kFills[kind], "\" fill-opacity=\"", fixed(opacity(chunk), 2));
  }

  void add_bar(Kind kind, int chunk, double begin, double end, double y, const std::string& text) {
    const double x = left_ + begin * scale_;
    const double width = (end - begin) * scale_;
    const double height = kBar * pitch_;
    // A gap between neighbours that are wide enough for one.
    bars_[{kind, fill(kind, chunk)}] += rect(x, y, std::max(width - (width > 3 ? 0.7 : 0), 0.1), height);
    if (text.empty() || height < kNumber + 2) return;
    if (width < static_cast<double>(text.size()) * kNumber * kDigit + 2) return;
    const bool dark = (kind == kF || kind == kW) && opacity(chunk) > 0.7;
    numbers_[dark ? "#ffffff" : "#1d2126"] += label(x + width / 2, y + height / 2 + kNumber * 0.36, text);
  }

  std::string draw_axis(double bottom) const {
    if (!(until_ > 0)) return "";
    std::string lines;
    std::string labels;
    const double gap = nice_step(until_, std::max(2.0, (right_ - left_) / 90));
    for (int i = 0; i * gap <= until_ * (1 + 1e-9); ++i) {
      const double x = left_ + i * gap * scale_;
      lines += concat("<path d=\"M", pixels(x), ' ', pixels(bottom), "v5\"/>\n");
      labels += label(x, bottom + 18, number(i * gap));
    }
    return concat("<g stroke=\"#646b75\">\n", lines, "</g>\n<g font-size=\"12\" text-anchor=\"middle\">\n", labels,
                  "</g>\n");
  }

  std::string draw_legend(double y) const {
    double x = left_;
    std::string out;
    const double size = std::min(1.0, (options_.width - kMargin - left_) / 800);
    for (int kind = 0; kind < kKinds; ++kind) {
      if (kind == kOptimizer && !has_optimizer_) continue;
      std::string text = kNames[kind];
      if (kind == kW && chunks_ > 1) text += " (lighter: later stages of a rank)";
      out += concat("<g fill=\"", kFills[kind], "\">", rect(x, y, 14 * size, 14 * size), "</g>\n");
      out += label(x + 20 * size, y + 12 * size, text);
      x += (44 + static_cast<double>(text.size()) * kText * 0.52) * size;
    }
    return concat("<g font-size=\"", pixels(kText * size), "\">\n", out, "</g>\n");
  }

  const Schedule& schedule_;
  const Simulation& simulation_;
  const SvgOptions& options_;
  std::vector<int> chunk_of_stage_;  // index of the stage on its rank
  int chunks_ = 1;                   // the most stages on a rank
  double pitch_ = 0;                 // from one row to the next
  double left_ = 0;                  // left end of the bars
  double right_ = 0;
  double top_ = 0;
  double until_ = 0;  // end of the axis
  double scale_ = 0;  // pixels per unit of time
  bool has_optimizer_ = false;
  std::map<std::pair<int, std::string>, std::string> bars_;  // by kind and colour; idle first, under the ops
  std::map<std::string, std::string> numbers_;               // by colour
};

}  // namespace

std::string draw_svg(const Schedule& schedule, const Simulation& simulation, const SvgOptions& options) {
  return Picture(schedule, simulation, options).draw();
}

}  // namespace twobp
