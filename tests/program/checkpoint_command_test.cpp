// Tests `twobp train` with checkpoints from outside: a run that is stopped and resumed, the metrics of such a run, and
// errors.
#include <filesystem>

#include "tests/program/subprocess.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;
using test::expect_one_message;
using test::expect_success;
using test::Finished;
using test::lines_of;
using test::read_file;

class Checkpoints : public test::InAFolder {
 protected:
  Checkpoints() {
    content_ = test::tiny_config();
    content_["train"]["steps"] = 6;
    content_["save"] = {{"checkpoints", path("checkpoints")}, {"every", 2}, {"model", path("model")}};
  }

  std::string config() const { return InAFolder::config(content_); }
  std::vector<std::string> arguments(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> all = {"train", config(), "--metrics", path("metrics.jsonl")};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  std::vector<std::pair<int, double>> losses() const {
    std::vector<std::pair<int, double>> losses;
    for (const json& step : metrics_of("metrics.jsonl")) losses.emplace_back(step.at("step"), step.at("loss"));
    return losses;
  }
  std::vector<std::string> checkpoints() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path("checkpoints"))) {
      if (entry.is_directory()) names.push_back(entry.path().filename());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  json content_;
};

TEST_F(Checkpoints, AResumedRunEqualsAnUninterruptedRun) {
  expect_success(arguments());
  const auto whole = losses();
  const std::string weights = read_file(path("model/model.safetensors"));
  ASSERT_EQ(whole.size(), 6U);
  EXPECT_EQ(checkpoints(), (std::vector<std::string>{"step-00000002", "step-00000004", "step-00000006"}));

  // This is the state after a kill in step 5, in the middle of a line.
  std::filesystem::remove_all(path("checkpoints/step-00000006"));
  std::filesystem::remove(path("model/model.safetensors"));
  std::string metrics = read_file(path("metrics.jsonl"));
  folder_.write("metrics.jsonl", metrics.substr(0, metrics.size() - 40));
  const Finished resumed =
      expect_success(arguments({"--resume", "--set", "pipeline.stages=3", "--set", "pipeline.p2=end"}));
  EXPECT_NE(resumed.out.find("resumed after step 4"), std::string::npos) << resumed.out;
  EXPECT_NE(resumed.out.find("held-out loss after step 4"), std::string::npos) << resumed.out;
  EXPECT_EQ(losses(), whole);
  EXPECT_EQ(read_file(path("model/model.safetensors")), weights);

  // No step is left to do. The model is saved again.
  std::filesystem::remove(path("model/model.safetensors"));
  expect_success(arguments({"--resume"}));
  EXPECT_EQ(losses(), whole);
  EXPECT_EQ(read_file(path("model/model.safetensors")), weights);
}

// Ctrl-C writes a checkpoint of the last step, whatever save.every is. A later run continues from it.
TEST_F(Checkpoints, InterruptSavesTheLastStep) {
  content_["train"]["steps"] = 1'000'000;
  content_["optimizer"]["schedule"] = "constant";
  content_["save"]["every"] = 1'000'000;
  test::RunOptions options;
  options.interrupt_when = [](const std::string& out) { return out.find("step 20/") != std::string::npos; };
  const Finished stopped = test::run_program(arguments(), options);
  EXPECT_EQ(stopped.exit_code, 130);
  const auto before = losses();
  ASSERT_GE(before.size(), 20U);
  const std::string digits = std::to_string(before.size());
  EXPECT_EQ(checkpoints(), std::vector<std::string>{"step-" + std::string(8 - digits.size(), '0') + digits});

  const std::string more = std::to_string(before.size() + 5);
  const Finished resumed = expect_success(arguments({"--resume", "--set", "train.steps=" + more}));
  EXPECT_NE(resumed.out.find("resumed after step " + digits), std::string::npos) << resumed.out;
  const auto after = losses();
  std::filesystem::remove_all(path("checkpoints"));
  expect_success(arguments({"--set", "train.steps=" + more}));
  EXPECT_EQ(losses(), after) << "the run that was not stopped";
}

TEST_F(Checkpoints, ResumeStartsARunThatHasNone) {
  // This line is from a run that ended before its first step.
  folder_.write("metrics.jsonl", "{\"step\": 1, \"loss\": 7}\n");
  const Finished result = expect_success(arguments({"--resume"}));
  EXPECT_NE(result.out.find("no checkpoint in " + path("checkpoints") + " yet"), std::string::npos) << result.out;
  EXPECT_EQ(losses().size(), 6U);
}

TEST_F(Checkpoints, RefuseContradictingArguments) {
  expect_one_message({"train", config(), "--resume", "--set", "save.checkpoints="}, {"--resume", "save.checkpoints"});
  expect_success(arguments());
  const auto whole = losses();
  expect_one_message(arguments(), {path("checkpoints"), "newest of step 6", "--resume"});
  expect_one_message(arguments({"--resume", "--set", "model.dim=32"}), {"cannot resume", "model.dim is 32 but 16"});
  expect_one_message(arguments({"--resume", "--set", "train.seed=5"}), {"cannot resume", "train.seed is 5 but 1"});
  expect_one_message(arguments({"--resume", "--set", "train.steps=4"}), {"train.steps is 4", "step-00000006"});
  EXPECT_EQ(losses(), whole) << "a refused run leaves the metrics";
  EXPECT_EQ(checkpoints().size(), 3U);
  if (std::filesystem::exists("/proc/self")) {
    expect_one_message({"train", config(), "--set", "save.checkpoints=/proc/self/checkpoints"},
                       {"save.checkpoints", "/proc/self/checkpoints"});
  }
  expect_one_message({"train", config(), "--set", "save.checkpoints=" + folder_.write("taken", "")}, {path("taken")});
}

TEST_F(Checkpoints, SkipADamagedNewestCheckpointWithAWarning) {
  expect_success(arguments());
  const auto whole = losses();
  std::filesystem::resize_file(path("checkpoints/step-00000006/weights.safetensors"), 1000);
  const Finished resumed = test::run_program(arguments({"--resume"}));
  EXPECT_EQ(resumed.exit_code, 0);
  EXPECT_EQ(lines_of(resumed.err).size(), 1U) << resumed.err;
  EXPECT_NE(resumed.err.find("warning"), std::string::npos) << resumed.err;
  EXPECT_NE(resumed.err.find("step-00000006/weights.safetensors is damaged: 1000 bytes"), std::string::npos)
      << resumed.err;
  EXPECT_NE(resumed.out.find("resumed after step 4"), std::string::npos) << resumed.out;
  EXPECT_EQ(losses(), whole);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
