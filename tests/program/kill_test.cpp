// Tests the promise of checkpoints. `twobp train` is killed at random moments, again and again. It is resumed each time
// on another pipeline. It ends with the weights and losses of a run that was never stopped, to the bit.
//
// The environment sets the number of kills (TWOBP_KILLS, default 5) and the seed of their moments (TWOBP_SEED, default
// 1).
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <tuple>

#include "tests/program/subprocess.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;
using test::expect_success;
using test::Finished;
using test::lines_of;
using test::read_file;
using test::TempFolder;

constexpr int kSteps = 200;

int number_from_environment(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

json config_in(const TempFolder& folder, const std::string& name, bool checkpoints) {
  json config = test::tiny_config();
  config["data"]["held_out"] = 0;
  config["train"]["steps"] = kSteps;
  config["train"]["clip_norm"] = 0.5;
  config["save"] = {{"model", folder.path(name + "-model")}};
  if (checkpoints) {
    config["save"]["checkpoints"] = folder.path(name + "-checkpoints");
    config["save"]["every"] = 1;
    config["save"]["keep"] = 2;
  }
  return config;
}

// Returns (step, loss) of every line.
std::vector<std::pair<int, double>> losses_in(const std::string& metrics) {
  std::vector<std::pair<int, double>> losses;
  for (const auto& line : lines_of(read_file(metrics))) {
    const json step = json::parse(line, nullptr, false);
    if (step.is_object()) losses.emplace_back(step.at("step"), step.at("loss"));  // a kill truncates a line
  }
  return losses;
}

// Returns the step after which a run said that it resumed: 0 if it started anew, -1 if it did not get so far.
int resumed_step(const std::string& out) {
  if (out.find("starting from the beginning") != std::string::npos) return 0;
  const std::string marker = "resumed after step ";
  const size_t at = out.find(marker);
  return at == std::string::npos ? -1 : std::atoi(out.c_str() + at + marker.size());
}

class Kill : public ::testing::Test {
 protected:
  std::vector<std::string> random_pipeline() {
    static const std::vector<std::string> schedules = {"naive", "gpipe", "1f1b"};
    static const std::vector<std::string> policies = {"off", "end", "cooldown", "fill"};
    const auto set = [](const std::string& key, const std::string& value) { return "pipeline." + key + "=" + value; };
    return {"--set", set("stages", std::to_string(1 + random_() % 3)),
            "--set", set("schedule", schedules[random_() % schedules.size()]),
            "--set", set("p2", policies[random_() % policies.size()]),
            "--set", set("memory_cap", random_() % 2 == 0 ? "auto" : "0")};
  }
  double uniform(double low, double high) { return std::uniform_real_distribution<double>(low, high)(random_); }

  TempFolder folder_;
  std::mt19937 random_{static_cast<unsigned>(number_from_environment("TWOBP_SEED", 1))};
};

TEST_F(Kill, EveryResumeEndsWithTheSameWeights) {
  const int wanted = number_from_environment("TWOBP_KILLS", 5);
  ASSERT_GT(wanted, 0);
  const std::string never_stopped = folder_.path("never-stopped.jsonl");
  const double whole = expect_success({"train", folder_.write("config.json", config_in(folder_, "whole", false).dump()),
                                       "--metrics", never_stopped})
                           .seconds;
  const auto losses = losses_in(never_stopped);
  ASSERT_EQ(losses.size(), static_cast<size_t>(kSteps));
  const std::string weights = read_file(folder_.path("whole-model/model.safetensors"));
  ASSERT_GT(weights.size(), 1000U);

  const double begin = now_seconds();
  int kills = 0;
  int in_training = 0;
  int rounds = 0;
  for (; kills < wanted; ++rounds) {
    const std::string name = concat("round", rounds);
    SCOPED_TRACE(name);
    const std::string metrics = folder_.path(name + ".jsonl");
    const std::string config = folder_.write(name + ".json", config_in(folder_, name, true).dump());
    int last_resumed = 0;
    int reached = 0;  // the last step that a killed run reported
    while (true) {
      std::vector<std::string> arguments = {"train", config, "--resume", "--metrics", metrics};
      for (const std::string& argument : random_pipeline()) arguments.push_back(argument);
      test::RunOptions options;
      options.timeout = 600;  // under ThreadSanitizer, a step with its checkpoint takes a second
      // The time lies between the first instruction of the program and long after the rest of training would end.
      if (kills < wanted) options.kill_after = uniform(0.001, 2 * whole);
      const Finished result = test::run_program(arguments, options);
      ASSERT_EQ(result.err, "") << join(arguments, " ");
      const int resumed = resumed_step(result.out);
      if (resumed >= 0) {
        // The last step's checkpoint may be missing, and the previous one may have been in progress.
        EXPECT_GE(resumed, reached - 2);
        EXPECT_GE(resumed, last_resumed);
        last_resumed = resumed;
      }
      if (result.exit_code == 0) break;
      ASSERT_EQ(result.exit_code, 128 + SIGKILL) << join(arguments, " ") << "\n" << result.out;
      ++kills;
      if (result.out.find("\nstep ") != std::string::npos) ++in_training;
      const auto told = losses_in(metrics);
      if (!told.empty()) reached = std::max(reached, told.back().first);
    }
    ASSERT_EQ(read_file(folder_.path(name + "-model/model.safetensors")) == weights, true) << "the weights differ";
    ASSERT_EQ(losses_in(metrics), losses) << "the losses differ, or a step is missing or reported twice";
  }
  std::printf(
      "%d kills (%d of them between the first and the last step told) in %d runs of %d steps, %.0f s: "
      "weights, losses equal\n",
      kills, in_training, rounds, kSteps, now_seconds() - begin);
}

// When the process is killed, all weights but those of one layer have changed, and their gradients are gone.
TEST_F(Kill, InTheTailOfStreamedGradients) {
  const auto config_of = [&](const std::string& name, bool checkpoints) {
    json config = config_in(folder_, name, checkpoints);
    config["train"]["clip_norm"] = 0;
    config["train"]["steps"] = 5;
    config["pipeline"]["micro_batches"] = 3;
    return folder_.write(name + ".json", config.dump());
  };
  expect_success({"train", config_of("kept", false), "--metrics", folder_.path("kept.jsonl")});
  const auto losses = losses_in(folder_.path("kept.jsonl"));
  ASSERT_EQ(losses.size(), 5U);
  const std::string weights = read_file(folder_.path("kept-model/model.safetensors"));
  for (const std::string split : {"6", "4,2"}) {
    const std::string name = concat("streamed", split);
    const std::string metrics = folder_.path(name + ".jsonl");
    const std::vector<std::string> train = {"train",
                                            config_of(name, true),
                                            "--resume",
                                            "--metrics",
                                            metrics,
                                            "--set",
                                            "pipeline.gradients=streamed",
                                            concat("pipeline.split=", split),
                                            "pipeline.stages=0",
                                            split == "6" ? "pipeline.ranks=1" : "pipeline.ranks=2"};
    {
      const test::Environment fault("TWOBP_FAIL", "W:step=3:micro_batch=2:layer=2:kill=1");
      const Finished killed = test::run_program(train);
      ASSERT_EQ(killed.exit_code, 128 + SIGKILL) << killed.out << killed.err;
    }
    EXPECT_EQ(losses_in(metrics).size(), 2U) << "step 3 did not end";
    EXPECT_GT(resumed_step(expect_success(train).out), 0);
    EXPECT_EQ(losses_in(metrics), losses) << name;
    EXPECT_EQ(read_file(folder_.path(name + "-model/model.safetensors")) == weights, true) << name;
  }
}

// The process of replica 1 dies before it sends tokens, for which replica 0 waits. Replicas 2 and 3 share other
// experts, and wait for sums.
TEST_F(Kill, InAnExchangeOfExperts) {
  json config = config_in(folder_, "experts", false);
  config["model"] = {
      {"type", "qwen3_moe"},    {"dim", 16},  {"layers", 2}, {"heads", 2}, {"hidden", 16}, {"experts", 4},
      {"experts_per_token", 2}, {"vocab", 32}};
  config["pipeline"] = {{"ranks", 1},         {"data_parallel", 4},    {"experts", 2}, {"timeout", 8},
                        {"micro_batches", 2}, {"micro_batch_size", 2}, {"pin", false}};
  const std::string file = folder_.write("experts.json", config.dump());
  for (const auto& [fault, op, layer] : {std::tuple{"F:step=2:replica=1:layer=2", "0F0", "model.layers.0.mlp"},
                                         {"I:step=2:replica=1:layer=4", "0I0", "model.layers.1.mlp"}}) {
    std::vector<test::Process> processes(4);
    for (test::Process& process : processes)
      process.environment = {concat("TWOBP_FAIL=", fault, ":kill=1"), "OMP_NUM_THREADS=1"};
    processes[2].environment[0] = "TWOBP_FAIL=F:step=2:replica=2:layer=2:seconds=1";  // they wait later
    std::atomic<int> ended = 0;
    const std::vector<Finished> finished = test::run_processes(processes, {"train", file}, ended);
    EXPECT_EQ(finished[1].exit_code, 128 + SIGKILL) << finished[1].err;
    const std::string reason = concat("rank 0, step 2, ", op, ": stage 0, layer ", layer,
                                      ": rank 0 waited 8 s for tokens of experts, micro-batch 0, step 2 from rank 1");
    for (const size_t i : {0, 2, 3}) {
      EXPECT_EQ(finished[i].exit_code, i == 0 ? 1 : 3) << i << ": " << finished[i].err;
      EXPECT_EQ(lines_of(finished[i].err).size(), 1U) << i << ": " << finished[i].err;
      EXPECT_NE(finished[i].err.find(reason), std::string::npos) << i << ": " << finished[i].err;
    }
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
