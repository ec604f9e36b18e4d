// Tests the SVG picture. A plain XML parser (Python's) finds the simulation in it, to scale.
#include "twobp/schedule/draw/svg.h"

#include <cmath>
#include <iomanip>
#include <limits>
#include <sstream>

#include <gtest/gtest.h>

#include "tests/schedule/support.h"
#include "tests/schedule/svg_picture.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/passes.h"

namespace twobp::TWOBP_FILE {
namespace {

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

class Svg : public SvgPicture {};

TEST_F(Svg, DrawsEveryOpToScale) {
  const auto [schedule, simulation] = simulated("1f1b", 4, 6, P2Policy::kFill, 0.5);
  parse(draw_svg(schedule, simulation, {.title = "a title"}));
  EXPECT_EQ(width_, 1200);
  EXPECT_EQ(title_, "a title");
  const std::vector<Bar> lanes = bars("url(#idle)");
  ASSERT_EQ(lanes.size(), 4U);
  const double scale = lanes[0].width / simulation.step_seconds;
  size_t ops = 0;
  for (int rank = 0; rank < 4; ++rank) {
    const auto& result = simulation.ranks[rank];
    for (const SimulatedOp& op : result.timeline) {
      ++ops;
      const char* fill = op.op == Op::kForward ? kF : op.op == Op::kBackwardP1 ? kI : kW;
      const auto drawn = bars(fill);
      const double x = lanes[rank].x + op.begin * scale;
      const double width = (op.end - op.begin) * scale;
      EXPECT_TRUE(std::any_of(drawn.begin(), drawn.end(),
                              [&](const Bar& bar) {
                                return std::abs(bar.x - x) < 0.02 && std::abs(bar.y - lanes[rank].y) < 0.02 &&
                                       bar.width <= width + 0.02 && bar.width > width - 1;
                              }))
          << "rank " << rank << " " << op_name(op.op) << op.micro_batch;
    }
    EXPECT_TRUE(has_text(concat("rank ", rank)));
  }
  EXPECT_EQ(ops, bars(kF).size() + bars(kI).size() + bars(kW).size()) << "nothing else is drawn";
  EXPECT_EQ(bars(kOptimizer).size(), 4U);
  EXPECT_TRUE(has_text("a title"));
  const double with_title = height_;
  parse(draw_svg(schedule, simulation, {}));
  EXPECT_EQ(with_title - height_, 30) << "a picture without a title has no room for one";
  for (const char* text : {"F: forward", "I: backward, dL/dx", "W: backward, dL/dw", "optimizer", "idle"})
    EXPECT_TRUE(has_text(text)) << text;
  // The last rank waits for N - 1 forwards. The rest is its own work.
  std::ostringstream idle;
  idle << "idle " << std::fixed << std::setprecision(1) << 100 * simulation.idle_fraction(3) << " %";
  EXPECT_TRUE(has_text(idle.str())) << idle.str();
}

TEST_F(Svg, WritesNumbersWhereTheyFit) {
  const auto numbers = [&](int width) {
    const auto [schedule, simulation] = simulated("gpipe", 2, 12, P2Policy::kEnd);
    parse(draw_svg(schedule, simulation, {.width = width}));
    // Ticks have numbers, too. So the test counts a number above any tick.
    return std::count(texts_.begin(), texts_.end(), "11");
  };
  EXPECT_EQ(numbers(3000), 2 * 3);  // F, I and W of the last micro-batch on two ranks
  EXPECT_EQ(numbers(400), 0);
}

TEST_F(Svg, ShadesTheStagesOfARank) {
  const auto [schedule, simulation] =
      simulated(add_communication(apply_p2_policy(looped_gpipe({0, 1, 1, 0}, 3), P2Policy::kFill)));
  const std::string svg = draw_svg(schedule, simulation);
  parse(svg);
  for (const char* fill : {kF, kI, kW}) EXPECT_EQ(bars(fill).size(), 2U * 3) << fill;  // the first stage of each rank
  // 55 % of the way to white
  for (const char* fill : {"#8cc0dc", "#f4d48c", "#8cd3c0"}) EXPECT_EQ(bars(fill).size(), 2U * 3) << fill << svg;
  EXPECT_TRUE(has_text("shades: the 2 stages of a rank, in model order"));
}

TEST_F(Svg, AnyTitleIsWellFormed) {
  const auto [schedule, simulation] = simulated("naive", 2, 1, P2Policy::kOff);
  const std::string hostile =
      "</text><script>&amp; \"'\x01\x1f \xff\xc0\xaf\xed\xa0\x80 \xe2\x82\xac \xc3\xbc \xf0\x9f\x98\x80 ]]>";
  parse(draw_svg(schedule, simulation, {.title = hostile}));
  const std::string bad = "\xef\xbf\xbd";
  std::string expected = "</text><script>&amp; \"'" + bad + bad + " ";
  for (int i = 0; i < 6; ++i) expected += bad;
  EXPECT_EQ(title_, expected + " \xe2\x82\xac \xc3\xbc \xf0\x9f\x98\x80 ]]>");
}

TEST_F(Svg, WritesUnitsOfSeconds) {
  const Schedule schedule = make_schedule("1f1b", 2, 2, P2Policy::kOff);
  std::vector<StageCost> costs(2);
  for (StageCost& cost : costs) cost.forward = cost.backward_p1 = cost.backward_p2 = 0.01;
  parse(draw_svg(schedule, simulate(schedule, costs), {.seconds = true}));
  EXPECT_TRUE(has_text("10 ms"));
  EXPECT_TRUE(has_text("0 ms"));
  parse(draw_svg(schedule, simulate(schedule, costs)));
  EXPECT_TRUE(has_text("0.01"));
}

TEST_F(Svg, TwoPicturesShareAScale) {
  const auto [schedule, simulation] = simulated("1f1b", 4, 4, P2Policy::kFill);
  parse(draw_svg(schedule, simulation));
  const double alone = bars("url(#idle)")[0].width;
  parse(draw_svg(schedule, simulation, {.until = 2 * simulation.step_seconds}));
  EXPECT_NEAR(bars("url(#idle)")[0].width, alone / 2, 0.02);
  parse(draw_svg(schedule, simulation, {.until = 0.5 * simulation.step_seconds}));
  EXPECT_EQ(bars("url(#idle)")[0].width, alone) << "nothing is cut off";
}

// With many ranks, rows get thinner, numbers vanish, and the picture's height has a limit.
TEST_F(Svg, LimitsTheHeightForManyRanks) {
  const auto [schedule, simulation] = simulated("1f1b", 300, 16, P2Policy::kEnd);
  const std::string svg = draw_svg(schedule, simulation);
  parse(svg);
  EXPECT_LE(height_, 4000);
  EXPECT_EQ(bars(kF).size(), 300U * 16);
  EXPECT_LT(svg.size(), 300U * 16 * 3 * 80);
}

TEST_F(Svg, DrawsEveryNamedSchedule) {
  for (const NamedSchedule& named : named_schedules()) {
    SCOPED_TRACE(named.name);
    const int stages = 4 * usual_stages_per_rank(named.placement);
    const Schedule schedule = make_schedule(named.name, stages, 8, policies_of(named.name).back(), 4);
    const Simulation simulation = simulate(schedule, std::vector<StageCost>(schedule.stages));
    parse(draw_svg(schedule, simulation));
    EXPECT_EQ(bars("url(#idle)").size(), 4U);
    size_t forwards = 0;
    for (const auto& rank : simulation.ranks) {
      forwards += std::count_if(rank.timeline.begin(), rank.timeline.end(),
                                [](const SimulatedOp& op) { return op.op == Op::kForward; });
    }
    EXPECT_EQ(bars(kF).size() + bars("#8cc0dc").size(), forwards);
  }
}

TEST_F(Svg, NeedsNoOtherFile) {
  const auto [schedule, simulation] = simulated("1f1b", 4, 4, P2Policy::kFill);
  std::string svg = draw_svg(schedule, simulation);
  const std::string space = "xmlns=\"http://www.w3.org/2000/svg\"";
  ASSERT_EQ(count(svg, space), 1U);
  svg.erase(svg.find(space), space.size());
  // The whole picture is white before anything else is drawn, also on a dark page.
  EXPECT_LT(svg.find("<rect width=\"1200\""), svg.find("<g "));
  for (const char* part : {"http", "href", "@import", "<script", "<image", "<style"})
    EXPECT_EQ(svg.find(part), std::string::npos) << part;
}

TEST(SvgText, KeepsWhatXmlAllows) {
  const auto [schedule, simulation] = three_ops(1);
  const std::string bad = "\xef\xbf\xbd";
  const auto escaped = [&](const std::string& title) {
    const std::string svg = draw_svg(schedule, simulation, {.title = title});
    const size_t begin = svg.find("<title>") + 7;
    return svg.substr(begin, svg.find("</title>") - begin);
  };
  EXPECT_EQ(escaped("a&b<c>d"), "a&amp;b&lt;c&gt;d");
  // Of each length, the first and the last character that is allowed.
  for (const char* kept : {" ", "\x7f", "a\tb", "a\nb", "a\rb", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xed\x9f\xbf",
                           "\xee\x80\x80", "\xef\xbf\xbd", "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf"})
    EXPECT_EQ(escaped(kept), kept);
  // One replacement for each byte that begins no such character.
  for (const char* wrong : {"\x1f", "\x0b", "\x80", "\xbf", "\xff"}) EXPECT_EQ(escaped(wrong), bad);
  for (const char* wrong :
       {"\xc1\xbf", "\xc2", "\xdf", "\xe2\x82", "\xf0\x9f\x98", "\xc0\x80", "\xe0\x9f\xbf", "\xed\xa0\x80",
        "\xed\xbf\xbf", "\xef\xbf\xbe", "\xef\xbf\xbf", "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80"}) {
    std::string replaced;
    for (size_t i = 0; i < std::string(wrong).size(); ++i) replaced += bad;
    EXPECT_EQ(escaped(wrong), replaced);
  }
  EXPECT_EQ(escaped("\xe2\x41\x82"), bad + "A" + bad);
  EXPECT_EQ(escaped("\xe2\x82\x41"), bad + bad + "A");
  EXPECT_EQ(escaped("\xc2\xc0"), bad + bad) << "both begin a character, none goes on";
}

TEST(SvgErrors, SayWhatToDo) {
  const auto [schedule, simulation] = simulated("gpipe", 2, 2, P2Policy::kOff);
  EXPECT_NE(error_of([&] { draw_svg(schedule, Simulation{}); }).find("0 ranks"), std::string::npos);
  EXPECT_NE(error_of([&] { draw_svg(schedule, simulation, {.width = 10}); }).find("300 to 20000"), std::string::npos);
  Simulation bare = simulation;
  for (auto& rank : bare.ranks) rank.timeline.clear();
  EXPECT_NE(error_of([&] { draw_svg(schedule, bare); }).find("no timeline"), std::string::npos);
  const auto [big, big_simulation] = simulated("1f1b", 64, 1100, P2Policy::kEnd);
  expect_contains(error_of([&] { draw_svg(big, big_simulation); }), {"211200 ops", "200000", "fewer"});
}

TEST(SvgErrors, KeepLimits) {
  const auto [schedule, simulation] = three_ops(1);
  for (const double until : {-1.0, std::numeric_limits<double>::infinity(), std::nan("")})
    expect_contains(error_of([&] { draw_svg(schedule, simulation, {.until = until}); }), {"cannot end at"});
  for (const int width : {299, 20001})
    expect_contains(error_of([&] { draw_svg(schedule, simulation, {.width = width}); }), {"300 to 20000"});
  for (const int width : {300, 20000})
    EXPECT_EQ(error_of([&] { draw_svg(schedule, simulation, {.width = width}); }), "");
  Simulation most = simulation;
  most.ranks[0].timeline.assign(200000, {Op::kForward, 0, 0, 0, 1});
  EXPECT_EQ(error_of([&] { draw_svg(schedule, most); }), "");
  most.ranks[0].timeline.push_back({Op::kForward, 0, 0, 0, 1});
  expect_contains(error_of([&] { draw_svg(schedule, most); }), {"200001 ops"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
