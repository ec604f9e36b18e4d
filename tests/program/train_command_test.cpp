// Tests `twobp train` from outside: its output, repeated runs, and the end by Ctrl-C.
#include <filesystem>

#include "tests/program/subprocess.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;
using test::expect_success;
using test::Finished;
using test::lines_of;
using test::read_file;
using test::tiny_config;

class Train : public test::InAFolder {
 protected:
  std::vector<json> train(const json& content, std::vector<std::string> overrides = {}) const {
    std::vector<std::string> arguments = {"train", config(content), "--metrics", path("metrics.jsonl")};
    for (const auto& override : overrides) arguments.insert(arguments.end(), {"--set", override});
    expect_success(arguments);
    return metrics_of("metrics.jsonl");
  }
};

TEST_F(Train, MetricsHaveAllKeysOnEveryLine) {
  const auto steps = train(tiny_config());
  ASSERT_EQ(steps.size(), 4U);
  for (size_t i = 0; i < steps.size(); ++i) {
    const json& step = steps[i];
    EXPECT_EQ(step.at("step"), i + 1);
    EXPECT_GT(step.at("loss").get<double>(), 0);
    EXPECT_GT(step.at("lr").get<double>(), 0);
    EXPECT_GT(step.at("grad_norm").get<double>(), 0);
    EXPECT_EQ(step.at("tokens"), 2 * 2 * 8);
    const double seconds = step.at("step_seconds").get<double>();
    EXPECT_GT(seconds, 0);
    EXPECT_NEAR(step.at("tokens_per_second").get<double>(), 32 / seconds, 1e-6 * 32 / seconds);
    ASSERT_EQ(step.at("idle_fraction").size(), 2U);
    for (const auto& idle : step.at("idle_fraction")) {
      EXPECT_GE(idle.get<double>(), 0);
      EXPECT_LE(idle.get<double>(), 1);
    }
    ASSERT_EQ(step.at("peak_bytes").size(), 2U);
    for (const auto& peak : step.at("peak_bytes")) EXPECT_GT(peak.get<int64_t>(), 0);
  }
}

TEST_F(Train, MetricsHaveTheHeldOutLossOfEvaluatedSteps) {
  json content = tiny_config();
  content["train"]["eval_every"] = 2;
  const auto steps = train(content);
  ASSERT_EQ(steps.size(), 4U);
  for (size_t i = 0; i < steps.size(); ++i) {
    ASSERT_EQ(steps[i].contains("held_out_loss"), i % 2 == 1) << i;
    EXPECT_EQ(steps[i].contains("held_out_accuracy"), i % 2 == 1) << i;
  }
  const Finished result = expect_success({"train", config(content)});
  char last[32];
  std::snprintf(last, sizeof(last), "-> %.4f\n", steps[3].at("held_out_loss").get<double>());
  EXPECT_NE(result.out.find(last), std::string::npos) << last << result.out;
}

TEST_F(Train, WarnsOfACapThatTheScheduleExceeds) {
  json content = tiny_config();
  content["pipeline"]["split"] = {3, 3};
  content["pipeline"]["memory_cap"] = "1";
  const Finished over = test::run_program({"train", config(content)});
  EXPECT_EQ(over.exit_code, 0);
  const std::string before = "pipeline.memory_cap is 1 bytes, but the fullest rank of 1f1b needs ";
  ASSERT_NE(over.err.find(before), std::string::npos) << over.err;
  const int64_t needs = std::stoll(over.err.substr(over.err.find(before) + before.size()));
  const auto warned = [&](int64_t cap) {
    content["pipeline"]["memory_cap"] = std::to_string(cap);
    return test::run_program({"train", config(content)}).err.find("memory_cap") != std::string::npos;
  };
  EXPECT_FALSE(warned(needs));
  EXPECT_TRUE(warned(needs - 1));
}

TEST_F(Train, ReportsTheRun) {
  const Finished result = expect_success({"train", config(tiny_config())});
  for (const char* part : {"2 stages", "1f1b with p2 fill", "2 micro-batches of 2", "held-out loss before training:",
                           "step 1/4", "step 4/4", "tokens/s", "idle", "held-out loss after training:", " -> ",
                           "peak memory", "parameters", "gradients", "optimizer", "activations", "p2 stash"}) {
    EXPECT_NE(result.out.find(part), std::string::npos) << "no \"" << part << "\" in:\n" << result.out;
  }
}

// The losses of whole runs agree in every bit. JSON carries all bits.
TEST_F(Train, GivesTheSameLossesForEveryPipeline) {
  const auto losses = [&](const std::vector<std::string>& overrides) {
    std::vector<double> values;
    for (const json& step : train(tiny_config(), overrides)) values.push_back(step.at("loss").get<double>());
    return values;
  };
  const auto expected = losses({"pipeline.stages=1", "pipeline.p2=off", "pipeline.schedule=gpipe"});
  ASSERT_EQ(expected.size(), 4U);
  EXPECT_NE(expected[0], expected[3]);
  EXPECT_EQ(losses({}), expected);
  EXPECT_EQ(losses({"pipeline.stages=3", "pipeline.p2=end"}), expected);
  EXPECT_EQ(losses({"pipeline.stages=3", "pipeline.split=1,1,4", "pipeline.memory_cap=25KiB"}), expected);
  EXPECT_NE(losses({"train.seed=2"}), expected);
}

TEST_F(Train, TrainsOnTextAndSavesTheModel) {
  json content = tiny_config();
  std::string text;
  for (int i = 0; i < 200; ++i) text += "In the beginning was the word. ";
  folder_.write("text.txt", text);
  content["model"]["vocab"] = 256;
  content["data"] = {{"text", path("*.txt")}, {"sequence", 16}, {"held_out", 0.1}};
  content["optimizer"]["lr"] = 1e-2;
  content["train"] = {{"steps", 30}, {"eval_every", 10}};
  content["save"] = {{"model", path("model")}};
  const auto steps = train(content);
  ASSERT_EQ(steps.size(), 30U);
  // The data repeats one sentence. In thirty steps the loss falls from ln 256 = 5.5 to well below it.
  EXPECT_GT(steps.front().at("loss").get<double>(), 5);
  EXPECT_LT(steps.back().at("loss").get<double>(), 4.5);
  EXPECT_TRUE(std::filesystem::exists(path("model/model.safetensors")));
  EXPECT_EQ(json::parse(read_file(path("model/config.json"))).at("vocab_size"), 256);
}

TEST_F(Train, PrintedConfigurationParsesBack) {
  const std::string all = expect_success({"train", config(tiny_config()), "--set", "optimizer.lr=0.25", "--set",
                                          "pipeline.split=2,4", "--print-config"})
                              .out;
  const json parsed = json::parse(all);
  EXPECT_EQ(parsed.at("optimizer").at("lr"), 0.25);
  EXPECT_EQ(parsed.at("pipeline").at("split"), (json::array({2, 4})));
  EXPECT_EQ(parsed.at("model").at("dim"), 16);
  for (const char* section : {"model", "data", "pipeline", "optimizer", "train", "save"}) {
    EXPECT_TRUE(parsed.contains(section)) << section;
  }
  const std::string again = expect_success({"train", folder_.write("all.json", all), "--print-config"}).out;
  EXPECT_EQ(again, all);
}

TEST_F(Train, RunsWithoutAConfigurationFile) {
  expect_success({"train", "--set", "data.synthetic=tokens", "--set", "model.dim=16", "--set", "model.layers=1",
                  "--set", "data.sequence=8", "--set", "pipeline.pin=false", "--set", "train.steps=1"});
}

// Ctrl-C comes in the middle of training. The current step is completed, the written files are whole, and the exit code
// is 130.
TEST_F(Train, InterruptEndsItWithinAStep) {
  json content = tiny_config();
  content["train"]["steps"] = 10'000'000;
  test::RunOptions options;
  options.interrupt_when = [](const std::string& out) { return out.find("step 20/") != std::string::npos; };
  const Finished result = test::run_program({"train", config(content), "--metrics", path("metrics.jsonl")}, options);
  EXPECT_EQ(result.exit_code, 130);
  EXPECT_EQ(lines_of(result.err).size(), 1U) << result.err;
  EXPECT_NE(result.err.find("interrupted after step "), std::string::npos) << result.err;
  const auto steps = metrics_of("metrics.jsonl");
  ASSERT_GE(steps.size(), 20U);
  EXPECT_NE(result.err.find(concat("after step ", steps.size(), " of ")), std::string::npos) << result.err;
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
