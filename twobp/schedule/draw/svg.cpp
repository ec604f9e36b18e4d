// Rectangles and numbers are grouped by colour, and colours are attributes. Every SVG reader understands this, and the
// files stay small.
#include "twobp/schedule/draw/svg.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <map>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/core/text.h"

namespace twobp {
namespace {

constexpr size_t kMostOps = 200000;
constexpr double kTallestRows = 3600;  // pixels, all rows together
constexpr double kRow = 26;
constexpr double kRowGap = 6;
constexpr double kMargin = 16;
constexpr double kNumberSize = 11;
constexpr double kSmallestNumber = 7;
constexpr double kNumberSpace = 2;  // around a number in its op
constexpr double kTextSize = 13;
constexpr double kCharacter = 0.6;  // width of a digit relative to the font size; few fonts have wider ones

struct Color {
  int red = 0;
  int green = 0;
  int blue = 0;
};

enum Kind : int { kF, kI, kW, kOptimizer, kKinds };
constexpr std::array<Color, kKinds> kFills = {
    {{0x00, 0x72, 0xb2}, {0xe6, 0x9f, 0x00}, {0x00, 0x9e, 0x73}, {0xcc, 0x79, 0xa7}}};
constexpr const char* kText = "#1d2126";
constexpr const char* kMuted = "#646b75";
constexpr const char* kLane = "#f1f1f0";
constexpr const char* kHatch = "#c9ccd1";
constexpr const char* kLine = "#dcdee2";

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

// The colour of the chunk-th of `chunks` stages: up to 55 % white.
Color shade(Color color, int chunk, int chunks) {
  const double white = chunks > 1 ? 0.55 * chunk / (chunks - 1) : 0;
  const auto mix = [&](int part) { return static_cast<int>(std::lround(part + (255 - part) * white)); };
  return {mix(color.red), mix(color.green), mix(color.blue)};
}

std::string hex(Color color) {
  std::array<char, 8> text{};
  std::snprintf(text.data(), text.size(), "#%02x%02x%02x", color.red, color.green, color.blue);
  return text.data();
}

// Rec. 709 luma of the stored values is good enough to decide between black and white.
bool is_dark(Color color) {
  return 0.2126 * color.red + 0.7152 * color.green + 0.0722 * color.blue < 115;
}

// At most two decimals (a hundredth of a pixel), no trailing zeros.
std::string coordinate(double value) {
  std::string out = fixed(value, 2);
  out.erase(out.find_last_not_of('0') + 1);
  if (out.back() == '.') out.pop_back();
  return out == "-0" ? "0" : out;
}

// The length in bytes of the UTF-8 character at `at`, or 0 if it is not one that XML 1.0 allows.
size_t character_length(const std::string& text, size_t at) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U; };
  const unsigned first = byte(at);
  if (first < 0x80) return first >= 0x20 || first == '\t' || first == '\n' || first == '\r' ? 1 : 0;
  const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4) return 0;
  unsigned code = first & (0xffU >> (length + 1));
  for (size_t i = 1; i < length; ++i) {
    if ((byte(at + i) & 0xc0U) != 0x80) return 0;
    code = code << 6 | (byte(at + i) & 0x3fU);
  }
  const bool overlong = (length == 3 && code < 0x800) || (length == 4 && code < 0x10000);
  const bool forbidden = (code >= 0xd800 && code < 0xe000) || code == 0xfffe || code == 0xffff;
  return overlong || forbidden || code > 0x10ffff ? 0 : length;
}

std::string escaped(const std::string& text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t length = character_length(text, at);
    const char c = text[at];
    if (length == 0) {
      out += "\xef\xbf\xbd";  // the replacement character
    } else if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else {
      out.append(text, at, length);
    }
    at += std::max<size_t>(length, 1);
  }
  return out;
}

// The smallest 1, 2 or 5 times a power of ten of which `span` has at most `most`.
double nice_step(double span, double most) {
  const double rough = span / most;
  const double power = std::pow(10, std::floor(std::log10(rough)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= rough) return factor * power;
  }
  return 10 * power;
}

class Picture {
 public:
  Picture(const Schedule& schedule, const Simulation& simulation, const SvgOptions& options)
      : schedule_(schedule), simulation_(simulation), options_(options) {
    check();
    chunk_of_stage_.resize(schedule.stages);
    std::vector<int> stages_of_rank(schedule.ranks.size(), 0);
    for (int stage = 0; stage < schedule.stages; ++stage) {
      chunk_of_stage_[stage] = stages_of_rank[schedule.rank_of_stage[stage]]++;
    }
    for (const int stages : stages_of_rank) chunks_ = std::max(chunks_, stages);
    const int ranks = schedule.rank_count();
    pitch_ = std::min(kRow + kRowGap, kTallestRows / std::max(ranks, 1));
    bar_ = pitch_ > 12 ? pitch_ - kRowGap : pitch_ * 0.8;
    left_ = kMargin + (5 + static_cast<double>(std::to_string(ranks - 1).size())) * kTextSize * 0.58 + 8;
    right_ = options.width - kMargin - 9 * kTextSize * 0.58;
    top_ = kMargin + (options.title.empty() ? 0 : 30);
    until_ = std::max(simulation.step_seconds, options.until);
    scale_ = until_ > 0 ? (right_ - left_) / until_ : 0;
    number_size_ = choose_number_size();
  }

  std::string draw() {
    for (int rank = 0; rank < schedule_.rank_count(); ++rank) add_row(rank);
    const double bottom = top_ + pitch_ * schedule_.rank_count();
    const std::string axis = draw_axis(bottom);
    const std::string legend = draw_legend(bottom + 40);
    const std::string size =
        concat("width=\"", options_.width, "\" height=\"", coordinate(legend_bottom_ + kMargin), "\"");
    std::string out = concat("<svg xmlns=\"http://www.w3.org/2000/svg\" ", size, " viewBox=\"0 0 ", options_.width, ' ',
                             coordinate(legend_bottom_ + kMargin),
                             "\" font-family=\"Helvetica, Arial, 'Liberation Sans', sans-serif\" font-size=\"",
                             coordinate(kTextSize), "\" role=\"img\">\n");
    out += concat("<title>", escaped(title()), "</title>\n");
    out += concat("<desc>", escaped(description()), "</desc>\n");
    out += concat("<defs><pattern id=\"idle\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" ",
                  "patternTransform=\"rotate(45)\"><rect width=\"6\" height=\"6\" fill=\"", kLane,
                  "\"/><rect width=\"1.5\" height=\"6\" fill=\"", kHatch, "\"/></pattern></defs>\n");
    out += concat("<rect ", size, " fill=\"#ffffff\"/>\n");
    if (!options_.title.empty()) {
      out += concat("<text x=\"", coordinate(kMargin), "\" y=\"", coordinate(kMargin + 14), "\" font-size=\"16\" ",
                    "font-weight=\"bold\" fill=\"", kText, "\">", escaped(options_.title), "</text>\n");
    }
    out += axis;
    out += concat("<g fill=\"url(#idle)\">\n", lanes_, "</g>\n");
    for (const auto& [fill, rects] : rects_) out += concat("<g fill=\"", fill, "\">\n", rects, "</g>\n");
    for (const auto& [fill, numbers] : numbers_) {
      out += concat("<g fill=\"", fill, "\" font-size=\"", coordinate(number_size_), "\" text-anchor=\"middle\">\n",
                    numbers, "</g>\n");
    }
    out += concat("<g fill=\"", kText, "\">\n", names_, "</g>\n");
    out += concat("<g fill=\"", kMuted, "\" font-size=\"12\">\n", idle_, "</g>\n");
    return out + legend + "</svg>\n";
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

  std::string title() const { return options_.title.empty() ? concat("Schedule ", schedule_.name) : options_.title; }
  std::string description() const {
    return concat(schedule_.name, " with p2 ", policy_name(schedule_.policy), ": ", schedule_.stages, " stages on ",
                  schedule_.rank_count(), " ranks, ", schedule_.count_text(), "; the ranks are idle for ",
                  percent(simulation_.bubble_ratio()), " of the step on average");
  }

  // Small enough that the longest number fits an op of the usual length, if it is then still readable.
  double choose_number_size() const {
    std::vector<double> lengths;
    for (const auto& rank : simulation_.ranks) {
      for (const SimulatedOp& op : rank.timeline) lengths.push_back((op.end - op.begin) * scale_);
    }
    if (lengths.empty()) return kNumberSize;
    const auto middle = lengths.begin() + static_cast<std::ptrdiff_t>(lengths.size() / 2);
    std::nth_element(lengths.begin(), middle, lengths.end());
    const auto digits = static_cast<double>(micro_batch_name(schedule_.micro_batches - 1, schedule_.slices).size());
    const double fitting = (*middle - kNumberSpace) / (digits * kCharacter);
    return std::min({kNumberSize, bar_ * 0.6, std::max(fitting, kSmallestNumber)});
  }
  bool row_has_text(int rank) const {
    const int every = std::max(1, static_cast<int>(std::ceil((kTextSize + 2) / pitch_)));
    return rank % every == 0;
  }

  void add_row(int rank) {
    const RankSimulation& result = simulation_.ranks[rank];
    const double y = top_ + pitch_ * rank;
    lanes_ += concat("<rect x=\"", coordinate(left_), "\" y=\"", coordinate(y), "\" width=\"",
                     coordinate(simulation_.step_seconds * scale_), "\" height=\"", coordinate(bar_), "\"/>\n");
    double busy = 0;
    for (const SimulatedOp& op : result.timeline) {
      const Color color = shade(kFills[picture_kind(op.op)], chunk_of_stage_[op.stage], chunks_);
      add_bar(color, op.begin, op.end, y, micro_batch_name(op.micro_batch, schedule_.slices));
      busy += op.end - op.begin;
    }
    // The optimizer is the busy time after the last op, before the tail.
    const double optimizer = result.busy - busy;
    if (optimizer > 1e-9 * result.busy) {
      const double end = simulation_.step_seconds - result.idle[static_cast<size_t>(IdleCause::kTail)];
      add_bar(kFills[kOptimizer], end - optimizer, end, y, "");
      has_optimizer_ = true;
    }
    if (!row_has_text(rank)) return;
    const std::string baseline = coordinate(y + bar_ / 2 + kTextSize * 0.36);
    names_ += concat("<text x=\"", coordinate(kMargin), "\" y=\"", baseline, "\">rank ", rank, "</text>\n");
    idle_ += concat("<text x=\"", coordinate(right_ + 8), "\" y=\"", baseline, "\">idle ",
                    percent(simulation_.idle_fraction(rank)), "</text>\n");
  }

  void add_bar(Color color, double begin, double end, double y, const std::string& text) {
    const double x = left_ + begin * scale_;
    const double width = (end - begin) * scale_;
    // A gap between neighbours that are wide enough for one.
    const double seam = width > 3 ? 0.7 : 0;
    rects_[hex(color)] += concat("<rect x=\"", coordinate(x), "\" y=\"", coordinate(y), "\" width=\"",
                                 coordinate(std::max(width - seam, 0.1)), "\" height=\"", coordinate(bar_), "\"/>\n");
    const double size = number_size_;
    if (text.empty() || size < kSmallestNumber - 2) return;
    if (width < static_cast<double>(text.size()) * size * kCharacter + kNumberSpace - 0.01) return;
    numbers_[is_dark(color) ? "#ffffff" : kText] +=
        concat("<text x=\"", coordinate(x + width / 2), "\" y=\"", coordinate(y + bar_ / 2 + size * 0.36), "\">", text,
               "</text>\n");
  }

  std::string tick(double value, double gap) const {
    double size = 1;
    const char* unit = "";
    if (options_.seconds) {
      unit = gap >= 0.5 ? " s" : gap >= 5e-4 ? " ms" : " \xc2\xb5s";
      size = gap >= 0.5 ? 1 : gap >= 5e-4 ? 1e-3 : 1e-6;
    }
    const int digits = std::clamp(static_cast<int>(-std::floor(std::log10(gap / size) + 1e-9)), 0, 12);
    std::array<char, 352> text{};
    std::snprintf(text.data(), text.size(), "%.*f%s", digits, value / size, unit);
    return text.data();
  }

  std::string draw_axis(double bottom) const {
    const double end = until_;
    if (!(end > 0)) return "";
    std::string lines;
    std::string labels;
    const double gap = nice_step(end, std::max(2.0, (right_ - left_) / 90));
    for (int i = 0; i * gap <= end * (1 + 1e-9); ++i) {
      const std::string x = coordinate(left_ + i * gap * scale_);
      lines += concat("<path d=\"M", x, ' ', coordinate(top_ - 4), 'V', coordinate(bottom + 4), "\"/>\n");
      labels += concat("<text x=\"", x, "\" y=\"", coordinate(bottom + 18), "\">", tick(i * gap, gap), "</text>\n");
    }
    return concat("<g stroke=\"", kLine, "\" fill=\"none\">\n", lines, "</g>\n<g fill=\"", kMuted,
                  "\" font-size=\"12\" text-anchor=\"middle\">\n", labels, "</g>\n");
  }

  std::string draw_legend(double y) {
    double x = left_;
    std::string out;
    const auto entry = [&](const std::vector<std::string>& fills, const std::string& text) {
      const double width =
          18.0 * static_cast<double>(fills.size()) + 6 + static_cast<double>(text.size()) * kTextSize * 0.52 + 20;
      if (x > left_ && x + width > options_.width - kMargin) {
        x = left_;
        y += 22;
      }
      for (const std::string& fill : fills) {
        out += concat("<rect x=\"", coordinate(x), "\" y=\"", coordinate(y), "\" width=\"14\" height=\"14\" fill=\"",
                      fill, "\"/>\n");
        x += 18;
      }
      out += concat("<text x=\"", coordinate(x + 2), "\" y=\"", coordinate(y + 12), "\" fill=\"", kText, "\">", text,
                    "</text>\n");
      x += width - 18.0 * static_cast<double>(fills.size());
    };
    const auto shades = [&](Kind kind) {
      std::vector<std::string> fills;
      const int step = 1 + (chunks_ - 1) / 6;  // of many chunks, only some
      for (int chunk = 0; chunk < chunks_; chunk += step) {
        fills.push_back(hex(shade(kFills[kind], chunk, chunks_)));
      }
      return fills;
    };
    entry(shades(kF), "F: forward");
    entry(shades(kI), "I: backward, dL/dx");
    entry(shades(kW), "W: backward, dL/dw");
    if (has_optimizer_) entry({hex(kFills[kOptimizer])}, "optimizer");
    entry({"url(#idle)"}, "idle");
    if (chunks_ > 1) entry({}, concat("shades: the ", chunks_, " stages of a rank, in model order"));
    legend_bottom_ = y + 14;
    return out;
  }

  const Schedule& schedule_;
  const Simulation& simulation_;
  const SvgOptions& options_;
  std::vector<int> chunk_of_stage_;  // index of the stage on its rank
  int chunks_ = 1;                   // the most stages on a rank
  double pitch_ = 0;                 // from one row to the next
  double bar_ = 0;                   // height of a bar
  double left_ = 0;                  // left end of the bars
  double right_ = 0;
  double top_ = 0;
  double until_ = 0;  // end of the axis
  double scale_ = 0;  // pixels per unit of time
  double number_size_ = 0;
  double legend_bottom_ = 0;
  bool has_optimizer_ = false;
  std::string lanes_;
  std::string names_;
  std::string idle_;
  std::map<std::string, std::string> rects_;    // by colour
  std::map<std::string, std::string> numbers_;  // by colour
};

}  // namespace

std::string draw_svg(const Schedule& schedule, const Simulation& simulation, const SvgOptions& options) {
  return Picture(schedule, simulation, options).draw();
}

}  // namespace twobp
