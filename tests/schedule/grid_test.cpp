// Tests the drawings. Whole pictures are compared with golden files. Set TWOBP_UPDATE_GOLDEN to rewrite those.
#include <cstdlib>
#include <fstream>
#include <sstream>

#include <gtest/gtest.h>

#include "tests/schedule/support.h"
#include "twobp/schedule/generators/generators.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/passes.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp::TWOBP_FILE {
namespace {

void expect_golden(const std::string& name, const std::string& text) {
  const std::string path = std::string(TWOBP_SOURCE_DIR) + "/tests/golden/" + name;
  if (std::getenv("TWOBP_UPDATE_GOLDEN") != nullptr) std::ofstream(path) << text;
  std::ifstream file(path);
  ASSERT_TRUE(file.good()) << "no golden file " << path;
  std::stringstream golden;
  golden << file.rdbuf();
  EXPECT_EQ(text, golden.str());
}

std::string unit_grid(const Schedule& schedule, int max_width = 0) {
  return draw_grid(schedule, simulate(schedule, std::vector<StageCost>(schedule.stages)), 1, max_width);
}

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

TEST(Grid, MatchesTheGoldenFiles) {
  std::string text;
  for (P2Policy policy : kPolicies) {
    text += "1f1b, 4 stages, 4 micro-batches, p2 " + std::string(policy_name(policy)) + "\n";
    text += unit_grid(make_schedule("1f1b", 4, 4, policy)) + "\n";
  }
  expect_golden("grid_1f1b_4x4.txt", text);
}

TEST(Grid, MatchesTheGoldenFileOfAVShape) {
  const Schedule schedule = add_communication(apply_p2_policy(looped_gpipe({0, 1, 1, 0}, 3), P2Policy::kFill));
  expect_golden("grid_v_shape.txt", unit_grid(schedule) + "\n" + draw_instructions(schedule, 1, 4));
}

TEST(Grid, DrawsOpsToScale) {
  std::vector<StageCost> costs(1);
  costs[0].backward_p1 = 2;
  costs[0].backward_p2 = 0.25;
  costs[0].optimizer = 2;
  const Schedule schedule = make_schedule("gpipe", 1, 1, P2Policy::kOff);
  EXPECT_EQ(draw_grid(schedule, simulate(schedule, costs), 1), "rank 0  F0 I0--- W0 O\n");
  EXPECT_EQ(draw_grid(schedule, simulate(schedule, costs), 0.5), "rank 0  F0--- I0--------- W0 O----------\n");
  // Ops shorter than a cell have one each.
  EXPECT_EQ(draw_grid(schedule, simulate(schedule, costs), 100), "rank 0  F0 I0 W0 O\n");
}

TEST(Grid, EndsTheOptimizerWhereTheRankEnds) {
  std::vector<StageCost> costs(2);
  for (StageCost& cost : costs) cost.optimizer = 2;
  const Schedule schedule = make_schedule("gpipe", 2, 1, P2Policy::kEnd);
  EXPECT_EQ(draw_grid(schedule, simulate(schedule, costs), 1),
            "rank 0  F0 .  .  I0 W0 O----\nrank 1  .  F0 I0 W0 O---- .\n");
}

TEST(Grid, WrapsIntoPanels) {
  const Schedule schedule = make_schedule("naive", 2, 1, P2Policy::kOff);
  // the label and three cells
  EXPECT_EQ(unit_grid(schedule, 17), "rank 0  F0 .  .\nrank 1  .  F0 I0\n\nrank 0  .  I0 W0\nrank 1  W0 .  .\n");
  // two cells
  EXPECT_EQ(unit_grid(schedule, 16),
            "rank 0  F0 .\nrank 1  .  F0\n\nrank 0  .  .\nrank 1  I0 W0\n\nrank 0  I0 W0\nrank 1  .  .\n");
  // all six
  EXPECT_EQ(count(unit_grid(schedule, 26), "rank 0"), 1U);
  // each panel still has a cell
  EXPECT_EQ(count(unit_grid(schedule, 1), "rank 0"), 6U);
}

TEST(Grid, AlignsLabels) {
  const std::string grid = unit_grid(make_schedule("1f1b", 11, 11, P2Policy::kFill));
  std::istringstream lines(grid);
  std::string first;
  std::string line;
  std::getline(lines, first);
  EXPECT_EQ(first.substr(0, 13), "rank  0  F0  ");
  while (std::getline(lines, line)) EXPECT_EQ(line.find_first_of("F."), 9U);
}

TEST(Grid, RefusesUnitsThatCannotBeDrawn) {
  const Schedule schedule = make_schedule("gpipe", 2, 2, P2Policy::kOff);
  const Simulation simulation = simulate(schedule, std::vector<StageCost>(2));
  EXPECT_THROW(draw_grid(schedule, simulation, 0), Error);
  EXPECT_THROW(draw_grid(schedule, simulation, -1), Error);
  EXPECT_NE(error_of([&] { draw_grid(schedule, simulation, 1e-9); }).find("larger unit"), std::string::npos);
  EXPECT_THROW(draw_grid(schedule, Simulation{}, 1), Error);
}

TEST(Instructions, MarksOneCell) {
  const Schedule schedule = gpipe(2, 1);
  EXPECT_EQ(draw_instructions(schedule), "rank 0  0F0 0B0\nrank 1  1F0 1B0\n");
  EXPECT_EQ(draw_instructions(schedule, 1, 0), "rank 0  0F0   0B0\nrank 1  >1F0< 1B0\n");
}

// From 49 cells on, those up to 12 cells from the mark are shown.
TEST(Instructions, ShowTheCellsAroundAMark) {
  EXPECT_EQ(count(draw_instructions(gpipe(1, 24), 0, 25), "..."), 0U);
  const Schedule schedule = gpipe(1, 25);  // 25 F and 25 B
  const auto shown = [&](int index) {
    const std::string text = draw_instructions(schedule, 0, index);
    return text.substr(0, 17) + " to " + text.substr(text.find_last_of(' ') + 1);
  };
  const auto cells = [&](int index) {
    const std::string text = draw_instructions(schedule, 0, index);
    return count(text, "0F") + count(text, "0B");
  };
  EXPECT_EQ(shown(25), "rank 0  ... 0F13  to ...\n");
  EXPECT_EQ(cells(25), 25U);
  EXPECT_EQ(shown(12), "rank 0  0F0 0F1 0 to ...\n");
  EXPECT_EQ(shown(13), "rank 0  ... 0F1 0 to ...\n");
  EXPECT_EQ(shown(37), "rank 0  ... 0B0 0 to 0B24\n");
  EXPECT_EQ(shown(36), "rank 0  ... 0F24  to ...\n");
  EXPECT_EQ(cells(49), 13U);
  EXPECT_EQ(count(draw_instructions(schedule), "..."), 0U) << "without a mark all are shown";
}

// From 17 ranks on, those up to 8 ranks from the mark are shown.
TEST(Instructions, ShowTheRanksAroundAMark) {
  const auto shown = [&](int ranks, int marked) {
    const std::string text = draw_instructions(gpipe(ranks, 1), marked, 0);
    const size_t first = text.find("rank"), last = text.rfind("rank");
    return concat(first > 0 ? "... " : "", std::stoi(text.substr(first + 5)), " to ", std::stoi(text.substr(last + 5)),
                  text.substr(text.size() - 4) == "...\n" ? " ..." : "");
  };
  EXPECT_EQ(shown(16, 0), "0 to 15");
  EXPECT_EQ(shown(17, 8), "0 to 16");
  EXPECT_EQ(shown(17, 7), "0 to 15 ...");
  EXPECT_EQ(shown(17, 9), "... 1 to 16");
  EXPECT_EQ(shown(40, 20), "... 12 to 28 ...");
}

TEST(Instructions, ShowTheNeighbourhoodOfAMarkOnly) {
  const Schedule schedule = make_schedule("1f1b", 64, 256, P2Policy::kOff);
  const std::string text = draw_instructions(schedule, 30, 500);
  EXPECT_EQ(marked_cell(text), to_string(schedule.ranks[30][500]));
  EXPECT_LT(text.size(), 10000U);
  EXPECT_EQ(count(text, "rank "), 17U);
  EXPECT_EQ(text.substr(0, 4), "...\n");
  EXPECT_GT(draw_instructions(schedule).size(), 100000U);
}

TEST(Grid, OptimizerWaitsForTheSummedGradients) {
  // There is one rank. B is done at 3, the sum takes 2, and the optimizer runs from 5 to 6.
  std::vector<StageCost> costs(1);
  costs[0].optimizer = 1;
  costs[0].gradient_bytes = 1;
  SimulationOptions options;
  options.data_parallel = {.replicas = 2, .latency = 1, .bytes_per_second = 1};
  const Schedule schedule = make_schedule("1f1b", 1, 1, P2Policy::kOff);
  EXPECT_EQ(draw_grid(schedule, simulate(schedule, costs, options), 1), "rank 0  F0 I0 W0 .  .  O\n");
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
