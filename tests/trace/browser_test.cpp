// Tests the timeline's page in headless Chromium (TWOBP_CHROMIUM, or chromium on the PATH). page_check.js operates it
// like a user. Nothing may be logged to the console. The tests are skipped if there is no Chromium.
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include <nlohmann/json.hpp>

#include "tests/trace/support.h"
#include "twobp/core/text.h"
#include "twobp/schedule/simulate/simulate.h"
#include "twobp/trace/compare.h"
#include "twobp/trace/simulated.h"
#include "twobp/trace/timeline.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::string find_chromium() {
  const char* given = std::getenv("TWOBP_CHROMIUM");
  if (given != nullptr) return given;
  for (const char* name : {"chromium", "chromium-browser", "google-chrome"}) {
    if (std::system(concat("command -v ", name, " > /dev/null 2>&1").c_str()) == 0) return name;
  }
  return "";
}

struct Seen {
  json check;
  std::string console;  // Chromium's log of the page's console
};

class Browser : public ::testing::Test {
 protected:
  void SetUp() override {
    chromium_ = find_chromium();
    if (chromium_.empty()) GTEST_SKIP() << "no Chromium: install chromium, or set TWOBP_CHROMIUM to its path";
    const std::string name = ::testing::UnitTest::GetInstance()->current_test_info()->name();
    folder_ = std::filesystem::path(::testing::TempDir()) / concat("twobp_browser_", name, "_", ::getpid());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override {
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }

  Seen open(const Trace& trace, const std::string& query = "", const std::string& window = "1400,900") const {
    std::string page = timeline_html(trace);
    const std::string watch =
        "<script>window.pageErrors = []; addEventListener('error', e => pageErrors.push(String(e.message)));"
        "for (const level of ['error', 'warn']) console[level] = text => "
        "pageErrors.push(String(text));</script>";
    page.insert(page.find("<meta"), watch);
    page.insert(page.rfind("</body>"),
                "<script>" + read_file(TWOBP_SOURCE_DIR "/tests/trace/page_check.js") + "</script>");
    const std::string file = folder_ / "page.html";
    std::ofstream(file, std::ios::binary) << page;
    const std::string out = folder_ / "dom.html";
    const std::string err = folder_ / "log.txt";
    const std::string command =
        concat("timeout 120 ", chromium_, " --headless --no-sandbox --disable-gpu --hide-scrollbars --no-first-run",
               " --user-data-dir='", (folder_ / "profile").string(), "' --window-size=", window,
               " --virtual-time-budget=10000 --enable-logging=stderr --dump-dom 'file://", file, query, "' > '", out,
               "' 2> '", err, "'");
    EXPECT_EQ(std::system(command.c_str()), 0) << read_file(err);
    Seen seen;
    const std::string log = read_file(err);
    for (const std::string& line : split(log, '\n')) {
      if (line.find("CONSOLE") != std::string::npos) seen.console += line + "\n";
    }
    const std::string dom = read_file(out);
    const std::string begin = "<script type=\"application/json\" id=\"check\">";
    const size_t from = dom.find(begin);
    if (from == std::string::npos) {
      ADD_FAILURE() << "the check did not run to its end\n" << seen.console << dom.substr(0, 2000);
      return seen;
    }
    seen.check = json::parse(dom.substr(from + begin.size(), dom.find("</script>", from) - from - begin.size()));
    return seen;
  }

  static void expect_works(const Trace& trace, const Seen& seen) {
    ASSERT_TRUE(seen.check.is_object());
    EXPECT_EQ(seen.console, "");
    EXPECT_EQ(seen.check.at("errors"), json::array());
    EXPECT_EQ(seen.check.at("problems"), json::array());
    EXPECT_EQ(seen.check.at("loaded"), 0) << "the page asks for other files";
    EXPECT_LE(seen.check.at("wider").get<int>(), 0) << "the page is wider than its window";
    ASSERT_EQ(seen.check.at("steps").size(), trace.steps.size());
    for (size_t i = 0; i < trace.steps.size(); ++i) {
      const json& step = seen.check.at("steps")[i];
      std::vector<int> expected(7, 0);
      size_t lanes = 0;
      std::vector<const StepReport*> runs = {&trace.steps[i]};
      if (trace.predicted) runs.push_back(&*trace.predicted);
      for (const StepReport* run : runs) {
        lanes += run->events.size();
        for (const auto& events : run->events) {
          for (const Event& event : events) ++expected[static_cast<int>(event.kind)];
        }
      }
      EXPECT_EQ(step.at("drawn"), json(expected)) << "F, I, W, optimizer, idle, send, receive";
      EXPECT_EQ(step.at("rows"), lanes);
      EXPECT_EQ(step.at("hover").at("memory"), lanes);
      const json& hovered = step.at("hover").at("counts");
      for (int kind = 0; kind < 3; ++kind) EXPECT_GT(hovered[kind].get<int>(), 0) << "nothing hovered of kind " << kind;
    }
  }

  std::string chromium_;
  std::filesystem::path folder_;
};

TEST_F(Browser, ShowsRealSteps) {
  const Trace trace = test::real_trace("llama, 2 stages");
  const Seen seen = open(trace);
  expect_works(trace, seen);
  EXPECT_EQ(seen.check.at("title"), "llama, 2 stages");
  EXPECT_EQ(seen.check.at("first"), "1");
  EXPECT_EQ(seen.check.at("second"), "2");
}

TEST_F(Browser, ShowsDarkAndNarrowPages) {
  const Trace trace = test::real_trace();
  const Seen dark = open(trace, "?theme=dark");
  expect_works(trace, dark);
  const Seen light = open(trace, "?theme=light", "520,800");
  expect_works(trace, light);
  EXPECT_NE(dark.check.at("page"), light.check.at("page"));
}

// A real run stands below the simulation of its schedule with the measured mean times.
TEST_F(Browser, ShowsThePredictionAboveTheMeasurement) {
  Trace trace = test::traced_run("llama, 2 stages");
  trace.predicted = compare(trace).step;
  const Seen light = open(trace);
  expect_works(trace, light);
  expect_works(trace, open(trace, "?theme=dark", "520,900"));
  EXPECT_EQ(light.check.at("first"), "2");
  EXPECT_EQ(light.check.at("second"), "3");
}

// In one step, each W lies within its I. In the other step, W interrupts other ops.
TEST_F(Browser, ShowsPartsOfOps) {
  Trace trace;
  trace.steps = test::real_steps("1f1b", P2Policy::kOff, 3, 1);
  trace.steps.push_back(test::real_steps("1f1b", P2Policy::kEnd, 3, 1, {4, 4}, 1).front());
  expect_works(trace, open(trace));
}

TEST_F(Browser, ShowsASimulatedSchedule) {
  const std::vector<StageCost> costs(4);
  Trace trace;
  trace.simulated = trace.abstract = true;
  for (const P2Policy policy : {P2Policy::kFill, P2Policy::kOff}) {
    const Schedule schedule = make_schedule("1f1b", 4, 8, policy);
    trace.step_names.push_back(concat("p2 ", policy_name(policy)));
    trace.steps.push_back(simulated_step(simulate(schedule, costs)));
  }
  const Seen seen = open(trace);
  ASSERT_TRUE(seen.check.is_object());
  EXPECT_EQ(seen.console, "");
  EXPECT_EQ(seen.check.at("errors"), json::array());
  EXPECT_EQ(seen.check.at("first"), "p2 fill");
  EXPECT_EQ(seen.check.at("second"), "p2 off");
  const std::vector<int> drawn = seen.check.at("steps")[0].at("drawn");
  EXPECT_EQ(drawn[0], 4 * 8);
}

TEST_F(Browser, ShowsHostileNames) {
  Trace trace = test::real_trace(test::kHostileName);
  trace.facts = {{test::kHostileName, test::kHostileName}};
  trace.step_names = {test::kHostileName, "2"};
  const Seen seen = open(trace);
  expect_works(trace, seen);
  EXPECT_EQ(seen.check.at("broken"), "");
  EXPECT_EQ(seen.check.at("title").get<std::string>().rfind("</script><script>", 0), 0U);
}

// One step has several thousand events: 8 ranks with 256 micro-batches.
TEST_F(Browser, ShowsManyEvents) {
  std::vector<StageCost> costs(8);
  for (StageCost& cost : costs) cost.p2_units = 8;
  const Schedule schedule = make_schedule("1f1b", 8, 256, P2Policy::kFill);
  Trace trace;
  trace.simulated = trace.abstract = true;
  trace.steps.push_back(simulated_step(simulate(schedule, costs)));
  size_t events = 0;
  for (const auto& rank : trace.steps[0].events) events += rank.size();
  ASSERT_GT(events, 6000U);
  const Seen seen = open(trace);
  ASSERT_TRUE(seen.check.is_object());
  EXPECT_EQ(seen.console, "");
  EXPECT_EQ(seen.check.at("errors"), json::array());
  EXPECT_EQ(seen.check.at("steps")[0].at("drawn")[0], 8 * 256);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
