// Tests the SVG picture: stored pictures, which were looked at in a browser, and the simulation in it, to
// scale.
#include "twobp/schedule/draw/svg.h"

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <regex>
#include <sstream>

#include <gtest/gtest.h>

#include "tests/schedule/support.h"
#include "twobp/core/text.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/passes.h"

namespace twobp::TWOBP_FILE {
namespace {

struct Simulated {
  Schedule schedule;
  Simulation simulation;
};

Simulated simulated(Schedule schedule, double optimizer = 0) {
  std::vector<StageCost> costs(schedule.stages);
  for (StageCost& cost : costs) cost.optimizer = optimizer;
  return {schedule, simulate(schedule, costs)};
}

struct Bar {
  double x = 0;
  double y = 0;
  double width = 0;
};

// The bars of a colour above the legend.
std::vector<Bar> bars(const std::string& svg, const std::string& fill) {
  std::vector<Bar> found;
  std::istringstream lines(svg);
  bool inside = false;
  for (std::string line; std::getline(lines, line);) {
    Bar bar;
    if (line == "<g fill=\"" + fill + "\">") inside = true;
    if (line == "</g>") inside = false;
    if (inside &&
        std::sscanf(line.c_str(), "<rect x=\"%lf\" y=\"%lf\" width=\"%lf\"", &bar.x, &bar.y, &bar.width) == 3) {
      found.push_back(bar);
    }
  }
  return found;
}

constexpr const char* kF = "#0072b2";
constexpr const char* kI = "#e69f00";
constexpr const char* kW = "#009e73";
constexpr const char* kIdle = "#e4e5e8";

// With TWOBP_UPDATE_GOLDEN, stores the pictures anew: look at them before you commit them.
TEST(Svg, MatchesTheStoredPictures) {
  const auto compare = [](const std::string& name, const Simulated& drawn, const SvgOptions& options) {
    const std::string svg = draw_svg(drawn.schedule, drawn.simulation, options);
    const std::string path = std::string(TWOBP_SOURCE_DIR) + "/tests/golden/svg/" + name + ".svg";
    if (std::getenv("TWOBP_UPDATE_GOLDEN") != nullptr) std::ofstream(path) << svg;
    std::ifstream file(path);
    ASSERT_TRUE(file.good()) << "no golden file " << path;
    std::stringstream golden;
    golden << file.rdbuf();
    EXPECT_EQ(svg, golden.str()) << name;
  };
  compare("1f1b", simulated(make_schedule("1f1b", 3, 4, P2Policy::kFill), 0.5), {.title = "1f1b <&> fill"});
  compare("zb_v", simulated(make_schedule("zb-v", 4, 2, P2Policy::kPlaced, 2)), {.width = 900, .until = 60});
  compare("narrow", simulated(make_schedule("gpipe", 2, 1, P2Policy::kOff)), {.width = 300});
}

TEST(Svg, DrawsEveryOpToScale) {
  const auto [schedule, simulation] = simulated(make_schedule("1f1b", 4, 6, P2Policy::kFill), 0.5);
  const std::string svg = draw_svg(schedule, simulation, {.title = "a title"});
  const std::vector<Bar> lanes = bars(svg, kIdle);
  ASSERT_EQ(lanes.size(), 4U);
  const double scale = lanes[0].width / simulation.step_seconds;
  size_t ops = 0;
  for (int rank = 0; rank < 4; ++rank) {
    for (const SimulatedOp& op : simulation.ranks[rank].timeline) {
      ++ops;
      const auto drawn = bars(svg, op.op == Op::kForward ? kF : op.op == Op::kBackwardP1 ? kI : kW);
      const double width = (op.end - op.begin) * scale;
      EXPECT_TRUE(std::any_of(drawn.begin(), drawn.end(),
                              [&](const Bar& bar) {
                                return std::abs(bar.x - lanes[rank].x - op.begin * scale) < 0.2 &&
                                       bar.y == lanes[rank].y && bar.width <= width + 0.1 && bar.width > width - 1;
                              }))
          << "rank " << rank << " " << op_name(op.op) << op.micro_batch;
    }
  }
  EXPECT_EQ(ops, bars(svg, kF).size() + bars(svg, kI).size() + bars(svg, kW).size());
  EXPECT_EQ(bars(svg, "#cc79a7").size(), 4U);
  for (const char* text :
       {"rank 3", "F: forward", "I: backward, dL/dx", "W: backward, dL/dw", "optimizer", "a title</title>"})
    EXPECT_NE(svg.find(text), std::string::npos) << text;
  const std::string idle = concat("idle ", percent(simulation.idle_fraction(3)));
  EXPECT_NE(svg.find(idle), std::string::npos) << idle;
}

TEST(Svg, ShadesTheStagesOfARank) {
  const auto [schedule, simulation] =
      simulated(add_communication(apply_p2_policy(looped_gpipe({0, 1, 1, 0}, 3), P2Policy::kFill)));
  const std::string svg = draw_svg(schedule, simulation);
  for (const std::string fill : {kF, kI, kW}) {
    EXPECT_EQ(bars(svg, fill).size(), 2U * 3) << fill;  // the first stage of each rank
    EXPECT_EQ(bars(svg, fill + "\" fill-opacity=\"0.45").size(), 2U * 3) << fill;
  }
}

TEST(Svg, WritesNumbersWhereTheyFit) {
  const auto [schedule, simulation] = simulated(make_schedule("gpipe", 2, 12, P2Policy::kEnd));
  const auto numbers = [&](int width) {
    const std::string svg = draw_svg(schedule, simulation, {.width = width});
    const std::regex last(">11</text>");
    return std::distance(std::sregex_iterator(svg.begin(), svg.end(), last), std::sregex_iterator());
  };
  EXPECT_EQ(numbers(3000), 2 * 3);  // F, I and W of the last micro-batch on two ranks
  EXPECT_EQ(numbers(400), 0);
}

TEST(Svg, TwoPicturesShareAScale) {
  const auto [schedule, simulation] = simulated(make_schedule("1f1b", 4, 4, P2Policy::kFill));
  const double alone = bars(draw_svg(schedule, simulation), kIdle)[0].width;
  const auto until = [&](double end) { return bars(draw_svg(schedule, simulation, {.until = end}), kIdle)[0].width; };
  EXPECT_NEAR(until(2 * simulation.step_seconds), alone / 2, 0.1);
  EXPECT_EQ(until(0.5 * simulation.step_seconds), alone) << "nothing is cut off";
}

// Up to 112 ranks have rows of 32 pixels. More share 3600 pixels, and have fewer names.
TEST(Svg, LimitsTheHeightForManyRanks) {
  for (const auto& [ranks, pitch, every] :
       {std::tuple{112, 32.0, 1}, {150, 24.0, 1}, {300, 12.0, 2}, {3600, 1.0, 15}}) {
    const auto [schedule, simulation] = simulated(make_schedule("1f1b", ranks, 2, P2Policy::kEnd));
    const std::string svg = draw_svg(schedule, simulation);
    double height = 0;
    ASSERT_EQ(std::sscanf(svg.c_str() + svg.find(" height="), " height=\"%lf", &height), 1);
    EXPECT_NEAR(height, 16 + ranks * pitch + 54 + 16, 0.05);
    const std::vector<Bar> lanes = bars(svg, kIdle);
    ASSERT_EQ(lanes.size(), static_cast<size_t>(ranks));
    for (const int rank : {0, 1, ranks - 1}) EXPECT_NEAR(lanes[rank].y, 16 + rank * pitch, 0.05);
    EXPECT_EQ(bars(svg, kF).size(), 2U * ranks);
    for (const int rank : {0, 1, every, 2 * every, 2 * every + 1})
      EXPECT_EQ(svg.find(concat(">rank ", rank, "<")) != std::string::npos, rank % every == 0)
          << rank << " of " << ranks;
    EXPECT_NE(svg.find(concat("height=\"", fixed(0.8 * pitch, 1), "\"")), std::string::npos) << "bars of 80 % of a row";
  }
}

TEST(Svg, KeepsWhatXmlAllows) {
  const auto [schedule, simulation] = simulated(make_schedule("naive", 1, 1, P2Policy::kOff));
  const std::string bad = "\xef\xbf\xbd";
  const auto escaped = [&](const std::string& title) {
    const std::string svg = draw_svg(schedule, simulation, {.title = title});
    const size_t begin = svg.find("<title>") + 7;
    return svg.substr(begin, svg.find("</title>") - begin);
  };
  EXPECT_EQ(escaped("a&b<c>d"), "a&amp;b&lt;c&gt;d");
  for (const char* kept : {" ", "\x7f", "a\tb", "a\nb", "\xc2\x80", "\xed\x9f\xbf", "\xf4\x8f\xbf\xbf"})
    EXPECT_EQ(escaped(kept), kept);
  // One replacement for each byte that begins no such character.
  for (const char* wrong : {"\x1f", "\x0b", "\x80", "\xff", "\xef\xbf\xbf"}) {
    EXPECT_EQ(escaped(wrong), bad) << wrong;
  }
  EXPECT_EQ(escaped("\xed\xa0\x80"), bad + bad + bad);
}

TEST(Svg, RefusesWhatCannotBeDrawn) {
  const auto [schedule, simulation] = simulated(make_schedule("gpipe", 2, 2, P2Policy::kOff));
  expect_contains(error_of([&] { draw_svg(schedule, Simulation{}); }), {"0 ranks"});
  Simulation bare = simulation;
  for (auto& rank : bare.ranks) rank.timeline.clear();
  expect_contains(error_of([&] { draw_svg(schedule, bare); }), {"no timeline"});
  for (const double until : {-1.0, std::numeric_limits<double>::infinity(), std::nan("")})
    expect_contains(error_of([&] { draw_svg(schedule, simulation, {.until = until}); }), {"cannot end at"});
  for (const int width : {299, 20001})
    expect_contains(error_of([&] { draw_svg(schedule, simulation, {.width = width}); }), {"300 to 20000"});
  for (const int width : {300, 20000})
    EXPECT_EQ(error_of([&] { draw_svg(schedule, simulation, {.width = width}); }), "");
  Simulation most = simulation;
  most.ranks[1].timeline.clear();
  most.ranks[0].timeline.assign(200001, {Op::kForward, 0, 0, 0, 1});
  expect_contains(error_of([&] { draw_svg(schedule, most); }), {"200001 ops", "200000", "fewer"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
