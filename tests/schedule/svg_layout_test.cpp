// Tests where the SVG picture has its parts. A letter is taken to be 0.58 of its size wide (0.52 in the legend), a
// digit in an op 0.6.
#include <gtest/gtest.h>

#include "tests/schedule/support.h"
#include "tests/schedule/svg_picture.h"
#include "twobp/schedule/draw/svg.h"
#include "twobp/schedule/passes.h"

namespace twobp::TWOBP_FILE {
namespace {

constexpr double kHundredth = 0.011;  // pixels: coordinates have two decimals

// Names of ranks begin at 16. Of 6 letters, they end at 16 + 6 * 13 * 0.58 = 61.24. Bars begin 8 after that.
constexpr double kLeft = 69.24;
// At the right there are 16, nine letters (67.86), and the bars: 1200 - 16 - 67.86.
constexpr double kRight = 1116.14;

class SvgLayout : public SvgPicture {
 protected:
  // All ticks, from left to right: labels that stand under a line.
  std::vector<std::string> ticks() const {
    std::vector<std::string> found;
    for (const Line& line : lines_) {
      for (const Label& label : labels_) {
        if (std::abs(label.x - line.x) < kHundredth && std::abs(label.y - line.bottom - 14) < kHundredth)
          found.push_back(label.text);
      }
    }
    return found;
  }
  std::vector<Bar> swatches() const {
    std::vector<Bar> found;
    for (const Bar& bar : bars_) {
      if (bar.width == 14 && bar.height == 14) found.push_back(bar);
    }
    return found;
  }
};

TEST_F(SvgLayout, PutsNamesLeftAndIdleTimeRightOfTheRows) {
  for (const int ranks : {2, 10, 11}) {
    const auto [schedule, simulation] = three_ops(ranks);
    parse(draw_svg(schedule, simulation));
    const std::vector<Bar> lanes = bars("url(#idle)");
    ASSERT_EQ(static_cast<int>(lanes.size()), ranks);
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_NEAR(lanes[rank].x, kLeft + (ranks > 10 ? 13 * 0.58 : 0), kHundredth);
      EXPECT_NEAR(lanes[rank].x + lanes[rank].width, kRight, kHundredth);
      EXPECT_EQ(lanes[rank].y, 16 + 32 * rank);
      EXPECT_EQ(lanes[rank].height, 26);
      const Label name = label(concat("rank ", rank));
      EXPECT_EQ(name.x, 16);
      EXPECT_NEAR(name.y, lanes[rank].y + 13 + 0.36 * 13, kHundredth) << "capitals are about 0.72 high";
      EXPECT_EQ(name.size, 13);
    }
    EXPECT_EQ(std::count(texts_.begin(), texts_.end(), "idle 0.0 %"), ranks);
    for (const Label& label : labels_) {
      if (label.text == "idle 0.0 %") {
        EXPECT_NEAR(label.x, kRight + 8, kHundredth);
      }
    }
  }
}

TEST_F(SvgLayout, CentresNumbersInTheirOps) {
  const auto [schedule, simulation] = three_ops(1);
  parse(draw_svg(schedule, simulation));
  std::vector<Label> numbers;
  for (const Label& label : labels_) {
    if (label.text == "0" && label.y < 16 + 26) numbers.push_back(label);  // the axis has a 0, too
  }
  std::sort(numbers.begin(), numbers.end(), [](const Label& a, const Label& b) { return a.x < b.x; });
  ASSERT_EQ(numbers.size(), 3U);
  const double second = (kRight - kLeft) / 6;
  for (const auto& [number, middle] : {std::pair{0, 0.5}, {1, 2.0}, {2, 4.5}}) {
    EXPECT_NEAR(numbers[number].x, kLeft + middle * second, kHundredth);
    EXPECT_NEAR(numbers[number].y, 16 + 13 + 0.36 * 11, kHundredth);
    EXPECT_EQ(numbers[number].size, 11);
    EXPECT_EQ(numbers[number].fill == "#ffffff", number == 0) << "blue is dark, orange and green are light";
  }
}

// A number of two digits of size s needs 1.2 s, and 2 of space.
TEST_F(SvgLayout, ShrinksNumbersAsFarAsTheyCanBeRead) {
  const auto size_with = [&](const Simulated& drawn, const char* number, double seconds_wide) {
    parse(draw_svg(drawn.schedule, drawn.simulation, {.until = (kRight - kLeft) / seconds_wide}));
    double size = 0;
    for (const Label& label : labels_) {
      if (label.text == number && label.y < bars("url(#idle)")[0].y + 26) size = label.size;
    }
    return size;
  };
  const Simulated twelve = simulated("gpipe", 1, 12, P2Policy::kEnd);  // every op takes 1
  EXPECT_EQ(size_with(twelve, "11", 20), 11);
  EXPECT_NEAR(size_with(twelve, "11", 12.8), 9, kHundredth);
  EXPECT_NEAR(size_with(twelve, "11", 10.4), 7, kHundredth) << "just fits";
  EXPECT_EQ(size_with(twelve, "11", 10.3), 0) << "does not fit";
  EXPECT_EQ(size_with(twelve, "9", 10.3), 7) << "one digit fits";
  EXPECT_EQ(size_with(twelve, "9", 6.1), 0);
  const Simulated ten = simulated("gpipe", 1, 10, P2Policy::kEnd);
  EXPECT_NEAR(size_with(ten, "9", 7.4), 9, kHundredth) << "no number has two digits";
  // The usual length counts, not the longest.
  Simulated one_long = twelve;
  one_long.simulation.ranks[0].timeline.back().end += 20;
  EXPECT_NEAR(size_with(one_long, "8", 12.8), 9, kHundredth);
}

TEST_F(SvgLayout, LeavesAGapBetweenWideOps) {
  const auto [schedule, simulation] = three_ops(1);
  const auto width = [&](double seconds_wide) {
    parse(draw_svg(schedule, simulation, {.until = (kRight - kLeft) / seconds_wide}));
    return bars(kF)[0].width;
  };
  EXPECT_NEAR(width(20), 19.3, kHundredth);
  EXPECT_NEAR(width(3.1), 2.4, kHundredth);
  EXPECT_NEAR(width(2.9), 2.9, kHundredth);
  EXPECT_NEAR(width(0.01), 0.1, kHundredth) << "no op vanishes";
}

TEST_F(SvgLayout, EndsTheOptimizerWhereTheRankEnds) {
  const auto [schedule, simulation] = simulated("gpipe", 2, 1, P2Policy::kEnd, 2);
  parse(draw_svg(schedule, simulation));
  // F of both, I of both, W of rank 0 and its optimizer: 1 + 1 + 1 + 1 + 1 + 2. Rank 1 ends at 6.
  const double second = (kRight - kLeft) / 7;
  const std::vector<Bar> found = bars(kOptimizer);
  ASSERT_EQ(found.size(), 2U);
  EXPECT_NEAR(found[0].x, kLeft + 5 * second, kHundredth);
  EXPECT_NEAR(found[1].x, kLeft + 4 * second, kHundredth);
  for (const Bar& bar : found) EXPECT_NEAR(bar.width, 2 * second - 0.7, kHundredth);
  EXPECT_TRUE(has_text("optimizer"));
  const auto without = simulated("gpipe", 2, 1, P2Policy::kEnd);
  parse(draw_svg(without.schedule, without.simulation));
  EXPECT_TRUE(bars(kOptimizer).empty());
  EXPECT_FALSE(has_text("optimizer"));
}

TEST_F(SvgLayout, MarksRoundTimesUnderTheRows) {
  const auto [schedule, simulation] = three_ops(2);
  parse(draw_svg(schedule, simulation));
  // Steps of 1, 2 or 5 times a power of ten, at least 90 pixels apart.
  EXPECT_EQ(ticks(), (std::vector<std::string>{"0", "1", "2", "3", "4", "5", "6"}));
  ASSERT_EQ(lines_.size(), 7U);
  for (int i = 0; i < 7; ++i) {
    EXPECT_NEAR(lines_[i].x, kLeft + i * (kRight - kLeft) / 6, kHundredth);
    EXPECT_EQ(lines_[i].top, 16 - 4);
    EXPECT_EQ(lines_[i].bottom, 16 + 2 * 32 + 4);
  }
  const auto with = [&](double until, int width = 1200, bool seconds = false) {
    parse(draw_svg(schedule, simulation, {.width = width, .until = until, .seconds = seconds}));
    return ticks();
  };
  using List = std::vector<std::string>;
  EXPECT_EQ(with(20), (List{"0", "2", "4", "6", "8", "10", "12", "14", "16", "18", "20"}));
  EXPECT_EQ(with(24.9), (List{"0", "5", "10", "15", "20"}));
  EXPECT_EQ(with(100).size(), 11U);
  EXPECT_EQ(with(100)[1], "10");
  EXPECT_EQ(with(10, 300), (List{"0", "5", "10"})) << "at least two steps";
  EXPECT_EQ(with(10, 300, true), (List{"0 s", "5 s", "10 s"}));
}

TEST_F(SvgLayout, WritesUnitsThatSuitTheSteps) {
  const auto ticks_of = [&](double step) {
    Simulated drawn = three_ops(1);
    drawn.simulation.ranks[0].busy = 0;
    for (SimulatedOp& op : drawn.simulation.ranks[0].timeline) op.begin = op.end = 0;
    drawn.simulation.step_seconds = step;
    parse(draw_svg(drawn.schedule, drawn.simulation, {.seconds = true}));
    const auto all = ticks();
    return all.empty() ? "" : all[0] + ", " + all[1] + " to " + all.back();
  };
  EXPECT_EQ(ticks_of(50), "0 s, 5 s to 50 s");
  EXPECT_EQ(ticks_of(5), "0.0 s, 0.5 s to 5.0 s");
  EXPECT_EQ(ticks_of(2), "0 ms, 200 ms to 2000 ms");
  EXPECT_EQ(ticks_of(5e-3), "0.0 ms, 0.5 ms to 5.0 ms");
  EXPECT_EQ(ticks_of(2e-3), "0 \xc2\xb5s, 200 \xc2\xb5s to 2000 \xc2\xb5s");
  EXPECT_EQ(ticks_of(2e-6), "0.0 \xc2\xb5s, 0.2 \xc2\xb5s to 2.0 \xc2\xb5s");
  EXPECT_EQ(ticks_of(0), "") << "no time, no axis";
}

TEST_F(SvgLayout, PutsTheLegendBelowTheAxis) {
  const auto [schedule, simulation] = simulated("gpipe", 2, 1, P2Policy::kEnd, 2);
  parse(draw_svg(schedule, simulation));
  const std::vector<Bar> found = swatches();
  ASSERT_EQ(found.size(), 5U);
  const std::vector<std::string> fills = {kF, kI, kW, kOptimizer, "url(#idle)"};
  const std::vector<std::string> names = {"F: forward", "I: backward, dL/dx", "W: backward, dL/dw", "optimizer",
                                          "idle"};
  double x = kLeft;
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(found[i].fill, fills[i]);
    EXPECT_NEAR(found[i].x, x, kHundredth);
    EXPECT_EQ(found[i].y, 16 + 2 * 32 + 40);
    const Label name = label(names[i]);
    EXPECT_NEAR(name.x, x + 20, kHundredth);
    EXPECT_EQ(name.y, found[i].y + 12);
    EXPECT_EQ(name.size, 13);
    x += 18 + 6 + static_cast<double>(names[i].size()) * 13 * 0.52 + 20;
  }
  EXPECT_EQ(height_, found[0].y + 14 + 16);
}

TEST_F(SvgLayout, BreaksALegendThatIsTooLong) {
  const auto [schedule, simulation] = simulated("gpipe", 2, 1, P2Policy::kEnd, 2);
  // "I: backward, dL/dx" needs 18 + 6 + 18 * 6.76 + 20 = 165.68, "F: forward" 111.6. Both fit between the left end of
  // the bars and the right margin of 16 from a width of 362.52 on.
  const auto rows = [&](int width) {
    parse(draw_svg(schedule, simulation, {.width = width}));
    std::vector<double> found;
    for (const Bar& swatch : swatches()) found.push_back(swatch.y - swatches()[0].y);
    for (const Bar& swatch : swatches()) {
      if (swatch.y != swatches()[0].y) {
        EXPECT_GE(swatch.x, kLeft - kHundredth);
      }
    }
    EXPECT_EQ(height_, swatches().back().y + 14 + 16);
    return found;
  };
  EXPECT_EQ(rows(363), (std::vector<double>{0, 0, 22, 22, 44}));
  EXPECT_NEAR(swatches()[2].x, kLeft, kHundredth);
  EXPECT_EQ(rows(362), (std::vector<double>{0, 22, 44, 44, 66}));
}

TEST_F(SvgLayout, ShowsAFewOfManyShades) {
  const auto shades_of_f = [&](int stages_per_rank) {
    std::vector<int> rank_of_stage;
    for (int i = 0; i < stages_per_rank; ++i) rank_of_stage.insert(rank_of_stage.end(), {0, 1});
    const auto [schedule, simulation] =
        simulated(add_communication(apply_p2_policy(looped_gpipe(rank_of_stage, 1), P2Policy::kEnd)));
    parse(draw_svg(schedule, simulation, {.width = 3000}));
    EXPECT_TRUE(has_text(concat("shades: the ", stages_per_rank, " stages of a rank, in model order")));
    return (swatches().size() - 1) / 3;  // without I, W and idle time
  };
  EXPECT_EQ(shades_of_f(3), 3U);
  // Up to 55 % white: half of that adds 0.275 of what is missing to 255.
  EXPECT_EQ(swatches()[1].fill, "#4699c7");
  EXPECT_EQ(shades_of_f(6), 6U);
  EXPECT_EQ(shades_of_f(7), 4U);
  EXPECT_EQ(shades_of_f(13), 5U);
}

TEST_F(SvgLayout, ThinsTheRowsOfManyRanks) {
  // All rows together are at most 3600 high.
  const auto drawn = [&](int ranks) {
    const auto [schedule, simulation] = three_ops(ranks);
    parse(draw_svg(schedule, simulation));
    return bars("url(#idle)");
  };
  EXPECT_EQ(drawn(112)[1].y, 16 + 32);
  const auto of_200 = drawn(200);
  EXPECT_EQ(of_200[1].y, 16 + 18);
  EXPECT_EQ(of_200[0].height, 12);
  EXPECT_TRUE(has_text("rank 1"));
  const auto of_300 = drawn(300);
  EXPECT_EQ(of_300[1].y, 16 + 12);
  EXPECT_NEAR(of_300[0].height, 9.6, kHundredth);
  EXPECT_FALSE(has_text("rank 1")) << "names need 15";
  EXPECT_TRUE(has_text("rank 2"));
  EXPECT_NEAR(label("rank 2").y, of_300[2].y + 4.8 + 0.36 * 13, kHundredth);
  const auto number_size = [&] {
    for (const Label& label : labels_) {
      if (label.text == "0" && label.fill == "#ffffff") return label.size;
    }
    return 0.0;
  };
  EXPECT_NEAR(number_size(), 5.76, kHundredth);
  drawn(360);  // numbers would have a size of 4.8
  EXPECT_EQ(number_size(), 0);
}

TEST_F(SvgLayout, DescribesTheSchedule) {
  const auto [schedule, simulation] = simulated("gpipe", 2, 3, P2Policy::kEnd);
  parse(draw_svg(schedule, simulation));
  EXPECT_EQ(title_, "Schedule gpipe");
  // Each rank works 9 of 11: its own ops, and one F and one I of the other rank.
  EXPECT_EQ(description_,
            "gpipe with p2 end: 2 stages on 2 ranks, 3 micro-batches; the ranks are idle for 18.2 % of the step on "
            "average");
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
