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

TEST_F(Stop, UnknownFailureIsRefused) {
  ::setenv("TWOBP_FAIL", "B:step=4", 1);
  test::expect_one_message(arguments(), {"TWOBP_FAIL=B:step=4", "F, I, W, optimizer or loader"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
