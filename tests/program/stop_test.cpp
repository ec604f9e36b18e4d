// How `twobp train` ends when it is told to, or when something breaks: the exit code, one line, and a
// checkpoint to go on from.
#include <cstdlib>
#include <filesystem>

#include "tests/program/subprocess.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;
using test::Finished;
using test::lines_of;
using test::RunOptions;
using test::TempFolder;

class Stop : public ::testing::Test {
 protected:
  Stop() {
    content_ = test::tiny_config();
    content_["train"]["steps"] = 1'000'000;
    content_["save"] = {{"checkpoints", folder_.path("checkpoints")}, {"every", 1'000'000}};
  }
  ~Stop() override { ::unsetenv("TWOBP_FAIL"); }

  std::vector<std::string> arguments() const {
    return {"train", folder_.write("config.json", content_.dump()), "--metrics", folder_.path("steps.jsonl")};
  }
  size_t steps_told() const { return lines_of(test::read_file(folder_.path("steps.jsonl"))).size(); }
  bool has_checkpoint(size_t step) const {
    char name[32];
    std::snprintf(name, sizeof(name), "checkpoints/step-%08zu", step);
    return std::filesystem::exists(folder_.path(name));
  }

  TempFolder folder_;
  json content_;
};

// What schedulers send before they take the machine away.
TEST_F(Stop, SigtermWritesACheckpoint) {
  RunOptions options;
  options.signal = SIGTERM;
  options.interrupt_when = [](const std::string& out) { return out.find("step 20/") != std::string::npos; };
  const Finished result = test::run_program(arguments(), options);
  EXPECT_EQ(result.exit_code, 143);
  EXPECT_EQ(lines_of(result.err).size(), 1U) << result.err;
  const size_t steps = steps_told();
  EXPECT_GE(steps, 20U);
  EXPECT_NE(
      result.err.find(concat("stopped by SIGTERM after step ", steps, " of 1000000, checkpoint written")),
      std::string::npos)
      << result.err;
  EXPECT_TRUE(has_checkpoint(steps));
}

// The first one waits for the step at hand; a second Ctrl-C does not.
TEST_F(Stop, SecondInterruptEndsItAtOnce) {
  ::setenv("TWOBP_FAIL", "F:step=3:seconds=30", 1);
  RunOptions options;
  options.signal = SIGINT;
  options.times = 2;
  options.interrupt_when = [](const std::string& out) { return out.find("step 2/") != std::string::npos; };
  const Finished result = test::run_program(arguments(), options);
  EXPECT_EQ(result.exit_code, 128 + SIGINT);
  EXPECT_LT(result.seconds, 20);
  EXPECT_EQ(result.err, "");
  EXPECT_FALSE(has_checkpoint(2));
}

// A launcher and the scheduler behind it may both send it.
TEST_F(Stop, SecondSigtermChangesNothing) {
  RunOptions options;
  options.signal = SIGTERM;
  options.times = 2;
  options.interrupt_when = [](const std::string& out) { return out.find("step 2/") != std::string::npos; };
  const Finished result = test::run_program(arguments(), options);
  EXPECT_EQ(result.exit_code, 128 + SIGTERM);
  EXPECT_NE(result.err.find("checkpoint written"), std::string::npos) << result.err;
}

// Ctrl-Z for longer than the time-out, while rank 1 waits for rank 0.
TEST_F(Stop, AStoppedRunGoesOnWhenContinued) {
  ::setenv("TWOBP_FAIL", "F:step=3:rank=0:seconds=0.4", 1);
  content_["train"]["steps"] = 4;
  content_["pipeline"]["timeout"] = 3;
  RunOptions options;
  options.signal = SIGSTOP;
  options.continue_after = 4;
  options.interrupt_when = [](const std::string& out) {
    if (out.find("step 2/") == std::string::npos) return false;
    ::usleep(300'000);  // rank 1 waits by now: rank 0 sleeps in each of its layers
    return true;
  };
  const Finished result = test::run_program(arguments(), options);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_GE(result.seconds, 4);
  EXPECT_EQ(steps_told(), 4U);
}

TEST_F(Stop, FailureIsOneReportThatSaysWhere) {
  for (const std::string where : {"F", "I", "W", "optimizer", "loader"}) {
    SCOPED_TRACE(where);
    const std::string fault = where + ":step=4:rank=1";
    ::setenv("TWOBP_FAIL", fault.c_str(), 1);
    const Finished result =
        test::expect_one_message(arguments(), {"a failure on demand, TWOBP_FAIL=" + fault});
    if (where != "loader") {
      EXPECT_NE(result.err.find("rank 1, step 4, "), std::string::npos) << result.err;
    }
    std::filesystem::remove_all(folder_.path("checkpoints"));
  }
}

// A rank that hangs: another one's time-out ends the process, threads that are stuck and all.
TEST_F(Stop, ARankThatHangsIsLeftBehind) {
  ::setenv("TWOBP_FAIL", "F:step=4:rank=0:seconds=300", 1);
  content_["pipeline"]["timeout"] = 1;
  const Finished result = test::expect_one_message(
      arguments(), {"rank 1, step 4, ", "waited 1 s", "from rank 0", "pipeline.timeout"});
  EXPECT_LT(result.seconds, 20);
}

TEST_F(Stop, DataThatIsOutOfReachIsNotWaitedForWithoutEnd) {
  ::setenv("TWOBP_FAIL", "loader:step=4:seconds=300", 1);
  content_["pipeline"]["timeout"] = 1;
  const Finished result =
      test::expect_one_message(arguments(), {"waited 1 s for a batch of the data", "pipeline.timeout"});
  EXPECT_LT(result.seconds, 20);
}

TEST_F(Stop, DataThatIsTruncatedIsAnErrorAndTheCheckpointStays) {
  const std::string tokens = folder_.write("tokens.bin", test::raw_bytes(std::vector<uint16_t>(100'000, 3)));
  content_["data"] = {{"tokens", tokens}, {"sequence", 8}, {"held_out", 0}};
  content_["save"]["every"] = 5;
  RunOptions options;
  options.signal = 0;  // none
  options.interrupt_when = [&](const std::string& out) {
    if (out.find("step 20/") == std::string::npos) return false;
    std::filesystem::resize_file(tokens, 16);
    return true;
  };
  const Finished result = test::run_program(arguments(), options);
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(lines_of(result.err).size(), 1U) << result.err;
  EXPECT_NE(result.err.find("tokens.bin: the file was truncated while it was in use"), std::string::npos)
      << result.err;
  test::expect_success({"checkpoint", "verify", folder_.path("checkpoints")});
}

// No update, no step: the losses are those of a run on data without these samples.
TEST_F(Stop, ABatchWithoutACountedLabelIsLeftOut) {
  const auto write = [&](const std::string& name, int samples, int unlabelled) {
    std::vector<int64_t> ids;
    std::vector<int64_t> labels;
    for (int64_t i = 0; i < int64_t{samples} * 8; ++i) {
      ids.push_back(i * 7 % 31);
      labels.push_back(ids.back());
    }
    for (int i = 0; i < unlabelled; ++i) {  // the second batch of four samples
      ids.insert(ids.begin() + 32, 8, 5);
      labels.insert(labels.begin() + 32, 8, -100);
    }
    std::filesystem::create_directory(folder_.path(name));
    const std::string shape = concat("(", samples + unlabelled, ", 8)");
    folder_.write(name + "/input_ids.npy", test::npy_file<int64_t>("<i8", shape, ids));
    folder_.write(name + "/labels.npy", test::npy_file<int64_t>("<i8", shape, labels));
    return folder_.path(name);
  };
  const std::string with = write("with", 12, 4);
  const std::string without = write("without", 12, 0);
  content_["data"] = {{"sequence", 8}, {"held_out", 0}, {"shuffle", false}};
  content_["train"] = {{"clip_norm", 0.1}};
  const auto losses = [&](const std::string& arrays, int steps, std::vector<std::string> more,
                          const char* warned) {
    content_["data"]["arrays"] = arrays;
    content_["train"]["steps"] = steps;
    std::vector<std::string> all = arguments();
    all.insert(all.end(), more.begin(), more.end());
    const Finished result = test::run_program(all);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.err.find("has no label that counts") != std::string::npos, *warned != '\0')
        << result.err;
    EXPECT_NE(result.err.find(warned), std::string::npos) << result.err;
    std::vector<double> values;
    for (const std::string& line : lines_of(test::read_file(folder_.path("steps.jsonl"))))
      values.push_back(json::parse(line).at("loss"));
    return values;
  };
  content_["optimizer"]["schedule"] = "constant";
  const std::vector<double> expected = losses(without, 7, {}, "");
  ASSERT_EQ(expected.size(), 7U);
  std::filesystem::remove_all(folder_.path("checkpoints"));
  EXPECT_EQ(losses(with, 7, {"--set", "pipeline.run_ahead=on"},
                   "batch 2 of epoch 2, before step 5, has no label that counts"),
            expected);
  const std::vector<double> replicas =
      losses(with, 7, {"--set", "pipeline.data_parallel=2", "pipeline.micro_batches=1", "save.checkpoints="},
             "samples 4, 5, 6, 7");
  ASSERT_EQ(replicas.size(), 7U);
  for (size_t i = 0; i < 7; ++i) EXPECT_NEAR(replicas[i], expected[i], 1e-5);
  // Stopped before the second such batch, and resumed.
  std::filesystem::remove_all(folder_.path("checkpoints"));
  losses(with, 1, {}, "");
  EXPECT_EQ(losses(with, 7, {"--resume"}, "batch 2 of epoch 1, before step 2"), expected);
}

TEST_F(Stop, UnknownFailureIsRefused) {
  ::setenv("TWOBP_FAIL", "B:step=4", 1);
  test::expect_one_message(arguments(), {"TWOBP_FAIL=B:step=4", "F, I, W, optimizer or loader"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
