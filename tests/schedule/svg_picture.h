// A simulated schedule, and what a plain XML parser (Python's) finds in its picture.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "twobp/core/check.h"
#include "twobp/schedule/draw/svg.h"
#include "twobp/schedule/named_schedules.h"

namespace twobp {

struct Simulated {
  Schedule schedule;
  Simulation simulation;
};

inline Simulated simulated(const std::string& name, int stages, int micro_batches, P2Policy policy,
                           double optimizer = 0) {
  Simulated result{make_schedule(name, stages, micro_batches, policy), {}};
  std::vector<StageCost> costs(result.schedule.stages);
  for (StageCost& cost : costs) cost.optimizer = optimizer;
  result.simulation = simulate(result.schedule, costs);
  return result;
}

inline Simulated simulated(Schedule schedule) {
  Simulated result{std::move(schedule), {}};
  result.simulation = simulate(result.schedule, std::vector<StageCost>(result.schedule.stages));
  return result;
}

// One op of each kind, with the times 1, 2 and 3, on each of `ranks` ranks, whatever the schedule's.
inline Simulated three_ops(int ranks, int micro_batches = 1) {
  Simulated result{make_schedule("gpipe", ranks, micro_batches, P2Policy::kEnd), {}};
  result.simulation.step_seconds = 6;
  for (int rank = 0; rank < ranks; ++rank) {
    RankSimulation& of = result.simulation.ranks.emplace_back();
    of.busy = 6;
    of.timeline = {{Op::kForward, rank, 0, 0, 1}, {Op::kBackwardP1, rank, 0, 1, 3}, {Op::kBackwardP2, rank, 0, 3, 6}};
  }
  return result;
}

struct Bar {
  std::string fill;
  double x = 0;
  double y = 0;
  double width = 0;
  double height = 0;
};

struct Label {
  std::string fill;
  double size = 0;  // of its font
  double x = 0;
  double y = 0;  // of its baseline
  std::string text;
};

// A vertical line.
struct Line {
  double x = 0;
  double top = 0;
  double bottom = 0;
};

// This fixture holds the elements that Python's XML parser finds. The script writes a line for each of them.
class SvgPicture : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* given = std::getenv("TWOBP_PYTHON");
    python_ = given != nullptr ? given : "python3";
    if (std::system((python_ + " -c '' 2> /dev/null").c_str()) != 0) GTEST_SKIP() << "no " << python_;
    folder_ = std::filesystem::path(::testing::TempDir()) /
              concat("twobp_svg_", ::testing::UnitTest::GetInstance()->current_test_info()->name(), "_", ::getpid());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override {
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }

  void parse(const std::string& svg) {
    bars_.clear();
    texts_.clear();
    labels_.clear();
    lines_.clear();
    const std::string script =
        "import sys, xml.etree.ElementTree as tree\n"
        "root = tree.parse(sys.argv[1]).getroot()\n"
        "space = '{http://www.w3.org/2000/svg}'\n"
        "assert root.tag == space + 'svg', root.tag\n"
        "w, h = float(root.get('width')), float(root.get('height'))\n"
        "print('size', w, h)\n"
        "def walk(node, fill, size):\n"
        "    if node.tag == space + 'defs': return\n"
        "    fill = node.get('fill', fill)\n"
        "    size = node.get('font-size', size)\n"
        "    if node.tag == space + 'rect':\n"
        "        x, y = float(node.get('x', 0)), float(node.get('y', 0))\n"
        "        dx, dy = float(node.get('width')), float(node.get('height'))\n"
        "        assert x >= 0 and y >= 0 and x + dx <= w + 0.02 and y + dy <= h + 0.02, node.attrib\n"
        "        print('rect', fill, x, y, dx, dy)\n"
        "    if node.tag == space + 'text':\n"
        "        assert 0 <= float(node.get('x')) <= w and 0 <= float(node.get('y')) <= h, node.attrib\n"
        "        print('text', fill, size, node.get('x'), node.get('y'), node.text)\n"
        "    if node.tag == space + 'path':\n"
        "        x, top, bottom = node.get('d').replace('M', '').replace('V', ' ').split()\n"
        "        print('line', x, top, bottom)\n"
        "    if node.tag == space + 'title': print('title', node.text)\n"
        "    if node.tag == space + 'desc': print('desc', node.text)\n"
        "    for child in node: walk(child, fill, size)\n"
        "walk(root, 'black', '')\n";
    std::ofstream(folder_ / "picture.svg", std::ios::binary) << svg;
    std::ofstream(folder_ / "parse.py") << script;
    const std::string out = folder_ / "out.txt";
    ASSERT_EQ(std::system(concat("PYTHONIOENCODING=utf-8 ", python_, " '", (folder_ / "parse.py").string(), "' '",
                                 (folder_ / "picture.svg").string(), "' > '", out, "'")
                              .c_str()),
              0)
        << svg.substr(0, 2000);
    std::ifstream lines(out);
    std::string line;
    while (std::getline(lines, line)) {
      std::istringstream words(line);
      std::string kind;
      words >> kind;
      if (kind == "size") words >> width_ >> height_;
      if (kind == "rect") {
        Bar bar;
        words >> bar.fill >> bar.x >> bar.y >> bar.width >> bar.height;
        bars_.push_back(bar);
      }
      if (kind == "text") {
        Label label;
        words >> label.fill >> label.size >> label.x >> label.y;
        std::getline(words.ignore(), label.text);
        texts_.push_back(label.text);
        labels_.push_back(label);
      }
      if (kind == "line") {
        Line drawn;
        words >> drawn.x >> drawn.top >> drawn.bottom;
        lines_.push_back(drawn);
      }
      if (kind == "title") title_ = line.substr(6);
      if (kind == "desc") description_ = line.substr(5);
    }
  }

  // Returns the bars of one colour, without the legend's swatch.
  std::vector<Bar> bars(const std::string& fill) const {
    std::vector<Bar> found;
    for (const Bar& bar : bars_) {
      if (bar.fill == fill && bar.height != 14) found.push_back(bar);
    }
    return found;
  }
  bool has_text(const std::string& text) const { return std::find(texts_.begin(), texts_.end(), text) != texts_.end(); }

  // The label with this text; the test fails unless there is exactly one.
  Label label(const std::string& text) const {
    std::vector<Label> found;
    for (const Label& one : labels_) {
      if (one.text == text) found.push_back(one);
    }
    EXPECT_EQ(found.size(), 1U) << text;
    return found.empty() ? Label{} : found[0];
  }

  std::string python_;
  std::filesystem::path folder_;
  double width_ = 0;
  double height_ = 0;
  std::string title_;
  std::string description_;
  std::vector<Bar> bars_;
  std::vector<Label> labels_;
  std::vector<Line> lines_;
  std::vector<std::string> texts_;
};

inline constexpr const char* kF = "#0072b2";
inline constexpr const char* kI = "#e69f00";
inline constexpr const char* kW = "#009e73";
inline constexpr const char* kOptimizer = "#cc79a7";

}  // namespace twobp
