// Tests `twobp plan --svg` and `twobp plan --measured` from outside.
#include "tests/program/subprocess.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;
using test::expect_one_message;
using test::expect_success;
using test::read_file;
using test::TempFolder;
using test::tiny_config;

class MeasuredCommand : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return folder_.path(name); }

  // Trains the tiny model and returns the path of its trace.
  std::string trace(const std::vector<std::string>& more = {}) const {
    const std::string config = folder_.write("config.json", tiny_config().dump());
    std::vector<std::string> arguments = {"train", config, "--trace", path("trace.json")};
    arguments.insert(arguments.end(), more.begin(), more.end());
    expect_success(arguments);
    return path("trace.json");
  }

  TempFolder folder_;
};

TEST_F(MeasuredCommand, ShowsARunBesideItsPrediction) {
  const std::string run = trace();
  const std::string out = expect_success({"plan", "--measured", run, "--json", path("both.json"), "--timeline",
                                          path("both.html"), "--svg", path("predicted.svg")})
                              .out;
  for (const char* part : {"predicted", "measured", "difference", "step time", "idle, rank 0", "idle, rank 1",
                           "peak memory, rank 1", "points", "3 steps", "rank 1, recorded W", "rank 1, simulated W"}) {
    EXPECT_NE(out.find(part), std::string::npos) << "no \"" << part << "\" in:\n" << out;
  }
  const json both = json::parse(read_file(path("both.json")));
  EXPECT_EQ(both.at("schedule"), "1f1b");
  EXPECT_EQ(both.at("p2"), "fill");
  EXPECT_EQ(both.at("steps"), 3);
  EXPECT_TRUE(both.at("replayed"));
  ASSERT_EQ(both.at("ranks").size(), 2U);
  ASSERT_EQ(both.at("stage_seconds").size(), 2U);
  for (const char* side : {"predicted", "measured"}) {
    EXPECT_GT(both.at("step_seconds").at(side).get<double>(), 0);
    for (const json& rank : both.at("ranks")) {
      EXPECT_GT(rank.at("peak_bytes").at(side).get<double>(), 0);
      const double idle = rank.at("idle_fraction").at(side);
      EXPECT_GE(idle, 0);
      EXPECT_LE(idle, 1);
    }
  }
  // The measured step time equals that of the trace.
  double seconds = 0;
  for (const json& each : json::parse(read_file(run))) {
    if (each.at("ph") == "X" && each.at("cat") == "step") seconds += each.at("dur").get<double>() * 1e-6 / 3;
  }
  EXPECT_NEAR(both.at("step_seconds").at("measured").get<double>(), seconds, 1e-9 + 1e-6 * seconds);
  const std::string page = read_file(path("both.html"));
  EXPECT_NE(page.find("\"predicted\":{"), std::string::npos);
  EXPECT_NE(page.find("model.layers.0.mlp.down_proj"), std::string::npos);
  const std::string picture = read_file(path("predicted.svg"));
  EXPECT_EQ(picture.rfind("<svg ", 0), 0U);
  EXPECT_NE(picture.find("predicted: "), std::string::npos);
}

TEST_F(MeasuredCommand, TakesSeveralStagesARank) {
  const std::string run = trace({"--set", "model.layers=4", "--set", "pipeline.schedule=zb-v", "--set",
                                 "pipeline.stages=4", "--set", "pipeline.p2=placed"});
  const std::string out = expect_success({"plan", "--measured", run}).out;
  EXPECT_NE(out.find("2 ranks"), std::string::npos) << out;
  EXPECT_EQ(out.find("recorded order"), std::string::npos) << "placed W needs none:\n" << out;
}

TEST_F(MeasuredCommand, TakesSlices) {
  const std::string run = trace({"--set", "pipeline.slices=2", "--set", "data.sequence=32"});
  const std::string text = read_file(run);
  EXPECT_NE(text.find("\"F0.1\""), std::string::npos) << "slice 1 of micro-batch 0";
  EXPECT_NE(text.find("\"I1.0\""), std::string::npos);
  const std::string out = expect_success({"plan", "--measured", run, "--timeline", path("both.html")}).out;
  EXPECT_NE(out.find("rank 1, recorded W"), std::string::npos) << out;
}

TEST_F(MeasuredCommand, PlanDrawsSlices) {
  const auto drawn = [&](std::vector<std::string> more) {
    std::vector<std::string> all = {"plan", "--schedule", "1f1b", "--stages", "2", "--micro-batches",
                                    "1",    "--p2",       "off"};
    all.insert(all.end(), more.begin(), more.end());
    return expect_success(all).out;
  };
  EXPECT_NE(drawn({}).find("50.0 %"), std::string::npos) << drawn({});
  const std::string sliced = drawn({"--slices", "4"});  // (N - 1) / (k M + N - 1)
  EXPECT_NE(sliced.find("1 micro-batches of 4 slices"), std::string::npos) << sliced;
  EXPECT_NE(sliced.find("F0.3"), std::string::npos) << sliced;
  EXPECT_NE(sliced.find("20.0 %"), std::string::npos) << sliced;
  expect_one_message({"plan", "--schedule", "1f1b", "--slices", "2", "--csv", path("none.csv")},
                     {"1f1b", "2 slices", "text form"});
  expect_one_message({"plan", "--schedule", "dualpipe-v", "--slices", "2"}, {"dualpipe-v", "slices"});
  expect_one_message({"plan", "--schedule", "1f1b", "--slices", "0"}, {"--slices"});
  expect_one_message({"plan", "--schedule", "1f1b", "--slices", "2,4"}, {"--slices", "several numbers"});
  const std::string searched = drawn({"--slices", "4", "--search"});
  EXPECT_NE(searched.find("auto"), std::string::npos) << searched;
}

TEST_F(MeasuredCommand, RefusesOtherTraces) {
  expect_one_message({"plan", "--measured", path("none.json")}, {path("none.json")});
  expect_one_message({"plan", "--measured", folder_.write("text.json", "what?")}, {"text.json", "not JSON"});
  expect_one_message({"plan", "--measured", folder_.write("empty.json", "[]")},
                     {"empty.json", "twobp train CONFIG --trace"});
  const std::string foreign =
      R"([{"ph":"X","name":"cudaLaunch","cat":"gpu","pid":0,"tid":7,"ts":1,"dur":2,"args":{}}])";
  expect_one_message({"plan", "--measured", folder_.write("foreign.json", foreign)},
                     {"foreign.json", "does not describe its run"});
  const std::string run = trace();
  for (const char* option : {"--json", "--timeline", "--svg"}) {
    expect_one_message({"plan", "--measured", run, option, path("no/such/file")}, {option, "no/such/file"});
  }
}

TEST_F(MeasuredCommand, PlanDrawsAnSvg) {
  expect_success({"plan", "--schedule", "1f1b", "--stages", "4", "--svg", path("plan.svg")});
  const std::string picture = read_file(path("plan.svg"));
  EXPECT_EQ(picture.rfind("<svg xmlns=\"http://www.w3.org/2000/svg\"", 0), 0U);
  EXPECT_NE(picture.find("1f1b with p2 fill, 4 ranks, 4 stages, 4 micro-batches"), std::string::npos);
  EXPECT_NE(picture.find(">rank 3<"), std::string::npos);
  expect_one_message({"plan", "--svg", path("no/such/file")}, {"--svg", "no/such/file"});
  expect_one_message({"plan", "--stages", "64", "--micro-batches", "2000", "--svg", path("big.svg")},
                     {"too large", "fewer"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
