// Tests `twobp train --trace` and scripts/tensorboard.py from outside.
#include <csignal>
#include <cstdlib>
#include <filesystem>

#include "tests/program/subprocess.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;
using test::expect_one_message;
using test::expect_success;
using test::Finished;
using test::read_file;
using test::tiny_config;

class TraceCommand : public test::InAFolder {
 protected:
  std::vector<std::string> steps_in(const std::string& file) const {
    std::vector<std::string> names;
    const json all = json::parse(read_file(path(file)));
    for (const json& each : all) {
      if (each.at("ph") == "X" && each.at("cat") == "step") names.push_back(each.at("name"));
    }
    return names;
  }
};

TEST_F(TraceCommand, WritesATrace) {
  const Finished result = expect_success({"train", config(tiny_config()), "--trace", path("trace.json")});
  EXPECT_EQ(steps_in("trace.json"), (std::vector<std::string>{"step 2", "step 3", "step 4"}));
  EXPECT_NE(read_file(path("trace.json")).find("model.layers.0.mlp.down_proj"), std::string::npos);
  EXPECT_NE(result.out.find("steps 2 to 4 are recorded in " + path("trace.json")), std::string::npos) << result.out;
}

TEST_F(TraceCommand, WritesOnlyTheChosenSteps) {
  expect_success({"train", config(tiny_config()), "--trace", path("trace.json"), "--trace-steps", "3"});
  EXPECT_EQ(steps_in("trace.json"), std::vector<std::string>{"step 3"});
}

// Recording must not change the results.
TEST_F(TraceCommand, DoesNotChangeTheLosses) {
  const auto losses = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"train", config(tiny_config()), "--metrics", path("metrics.jsonl")};
    arguments.insert(arguments.end(), more.begin(), more.end());
    expect_success(arguments);
    std::vector<double> values;
    for (const json& step : metrics_of("metrics.jsonl")) values.push_back(step.at("loss"));
    return values;
  };
  EXPECT_EQ(losses({}), losses({"--trace", path("trace.json"), "--trace-steps", "1-4"}));
}

TEST_F(TraceCommand, AnInterruptedRunWritesItsSteps) {
  json content = tiny_config();
  content["train"]["steps"] = 100000;
  test::RunOptions options;
  options.interrupt_when = [](const std::string& out) { return out.find("step 20/") != std::string::npos; };
  const Finished result = test::run_program({"train", config(content), "--set", "train.log_every=20", "--trace",
                                             path("trace.json"), "--trace-steps", "3-100"},
                                            options);
  EXPECT_EQ(result.exit_code, 130) << result.err;
  EXPECT_FALSE(steps_in("trace.json").empty());
}

TEST_F(TraceCommand, RefusesImpossibleSettings) {
  const std::string file = config(tiny_config());
  expect_one_message({"train", file, "--trace-steps", "3"}, {"--trace-steps", "--trace FILE"});
  expect_one_message({"train", file, "--trace", path("t"), "--trace-steps", "3-9"}, {"--trace-steps", "3-9", "1 to 4"});
  expect_one_message({"train", file, "--trace", path("t"), "--trace-steps", "x"}, {"--trace-steps", "'x'"});
  expect_one_message({"train", file, "--trace", path("no/such/file")}, {path("no/such/file")});
}

// Slice 1 of micro-batch 0 is F0.1.
TEST_F(TraceCommand, NamesSlices) {
  expect_success({"train", config(tiny_config()), "--trace", path("trace.json"), "--set", "pipeline.slices=2", "--set",
                  "data.sequence=32"});
  const std::string text = read_file(path("trace.json"));
  EXPECT_NE(text.find("\"F0.1\""), std::string::npos);
  EXPECT_NE(text.find("\"I1.0\""), std::string::npos);
}

class TensorBoard : public TraceCommand {
 protected:
  void SetUp() override {
    const char* given = std::getenv("TWOBP_PYTHON");
    python_ = given != nullptr ? given : "python3";
    if (std::system((python_ + " -c 'from torch.utils.tensorboard import SummaryWriter' 2> /dev/null").c_str()) != 0) {
      GTEST_SKIP() << python_ << " has no torch or no tensorboard: pip install tensorboard==2.21.0";
    }
  }
  int script(const std::string& arguments) const {
    return std::system((python_ + " " TWOBP_SOURCE_DIR "/scripts/tensorboard.py " + arguments + " > '" + path("out") +
                        "' 2> '" + path("err") + "'")
                           .c_str());
  }
  // Returns {tag: [[step, value], ...]} as TensorBoard reads it.
  json events(const std::string& logdir) const {
    const std::string code =
        "import json, sys\n"
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "all = EventAccumulator(sys.argv[1], size_guidance={'scalars': 0})\n"
        "all.Reload()\n"
        "print(json.dumps({tag: [[e.step, e.value] for e in all.Scalars(tag)] for tag in "
        "all.Tags()['scalars']}))\n";
    const std::string file = folder_.write("read.py", code);
    EXPECT_EQ(std::system((python_ + " '" + file + "' '" + logdir + "' > '" + path("events.json") + "' 2> '" +
                           path("err") + "'")
                              .c_str()),
              0)
        << read_file(path("err"));
    return json::parse(read_file(path("events.json")));
  }

  std::string python_;
};

TEST_F(TensorBoard, HasTheValuesOfTheMetrics) {
  expect_success({"train", config(tiny_config()), "--metrics", path("metrics.jsonl")});
  ASSERT_EQ(script("'" + path("metrics.jsonl") + "' '" + path("logs") + "'"), 0) << read_file(path("err"));
  const json seen = events(path("logs"));
  const auto lines = metrics_of("metrics.jsonl");
  ASSERT_EQ(lines.size(), 4U);
  for (const char* tag : {"loss", "lr", "grad_norm", "tokens_per_second", "idle/rank 0", "idle/rank 1",
                          "peak_bytes/stage 0", "peak_bytes/stage 1"}) {
    ASSERT_TRUE(seen.contains(tag)) << tag;
    EXPECT_EQ(seen.at(tag).size(), 4U) << tag;
  }
  for (size_t i = 0; i < lines.size(); ++i) {
    const json& line = lines[i];
    const auto expect_value = [&](const char* tag, double value) {
      EXPECT_EQ(seen.at(tag)[i][0], i + 1);
      // TensorBoard stores float32.
      EXPECT_NEAR(seen.at(tag)[i][1].get<double>(), value, 1e-6 * std::abs(value)) << tag;
    };
    expect_value("loss", line.at("loss"));
    expect_value("lr", line.at("lr"));
    expect_value("idle/rank 1", line.at("idle_fraction")[1]);
    expect_value("peak_bytes/stage 0", line.at("peak_bytes")[0]);
  }
}

TEST_F(TensorBoard, FollowsAFileThatGrowsAndIsCutBack) {
  const std::string metrics = path("growing.jsonl");
  const std::string go = "'" + python_ + "' " TWOBP_SOURCE_DIR "/scripts/tensorboard.py '" + metrics + "' '" +
                         path("logs") + "' --follow --interval 0.1 > '" + path("out") + "' 2> '" + path("err") +
                         "' & pid=$!; ";
  const auto line = [](int step, double loss) { return concat("{\"step\": ", step, ", \"loss\": ", loss, "}\\n"); };
  // Half a line is ignored until the rest is there. Step 2 appears again after a resume, with another loss.
  const std::string writes = "sleep 6; printf '" + line(1, 4) + line(2, 3) + "{\"step\": 3, ' > '" + metrics +
                             "'; sleep 1; printf '\"loss\": 2}\\n' >> '" + metrics + "'; sleep 1; printf '" +
                             line(1, 4) + "' > '" + metrics + "'; sleep 1; printf '" + line(2, 2.5) + "' >> '" +
                             metrics + "'; sleep 1; kill -INT $pid; wait $pid";
  ASSERT_EQ(std::system((go + writes).c_str()), 0) << read_file(path("err"));
  EXPECT_EQ(events(path("logs")).at("loss"), json::parse("[[1, 4.0], [2, 2.5]]")) << read_file(path("out"));
}

TEST_F(TensorBoard, RefusesOtherFiles) {
  EXPECT_NE(script("'" + path("none") + "' '" + path("logs") + "'"), 0);
  EXPECT_NE(read_file(path("err")).find("no such file: " + path("none")), std::string::npos);
  const std::string bad = folder_.write("bad.jsonl", "{\"step\": 1}\nnot json\n");
  EXPECT_NE(script("'" + bad + "' '" + path("logs") + "'"), 0);
  EXPECT_NE(read_file(path("err")).find("line 2"), std::string::npos) << read_file(path("err"));
  const std::string empty = folder_.write("empty.jsonl", "");
  EXPECT_NE(script("'" + empty + "' '" + path("logs") + "'"), 0);
  EXPECT_NE(read_file(path("err")).find("no steps"), std::string::npos);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
