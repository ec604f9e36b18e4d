// Tests how `twobp train` ends when it is told to stop, or when something breaks. It gives an exit code, one line, and
// a checkpoint for resuming.
#include <cstdlib>
#include <filesystem>
#include <sys/stat.h>

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
  std::string losses() const {
    std::string all;
    for (const std::string& line : lines_of(test::read_file(folder_.path("steps.jsonl"))))
      all += json::parse(line).at("loss").dump() + " ";
    return all;
  }
  bool has_checkpoint(size_t step) const {
    char name[32];
    std::snprintf(name, sizeof(name), "checkpoints/step-%08zu", step);
    return std::filesystem::exists(folder_.path(name));
  }

  static bool step_3_is_under_way(const std::string& out) {
    if (out.find("step 2/") == std::string::npos) return false;
    ::usleep(300'000);
    return true;
  }

  TempFolder folder_;
  json content_;
};

// Schedulers send this signal before they take the machine away.
TEST_F(Stop, SigtermWritesACheckpoint) {
  RunOptions options;
  options.signal = SIGTERM;
  options.interrupt_when = [](const std::string& out) { return out.find("step 20/") != std::string::npos; };
  const Finished result = test::run_program(arguments(), options);
  EXPECT_EQ(result.exit_code, 143);
  EXPECT_EQ(lines_of(result.err).size(), 1U) << result.err;
  const size_t steps = steps_told();
  EXPECT_GE(steps, 20U);
  EXPECT_NE(result.err.find(concat("stopped by SIGTERM after step ", steps, " of 1000000, checkpoint written")),
            std::string::npos)
      << result.err;
  EXPECT_TRUE(has_checkpoint(steps));
}

// A step of a minute is abandoned within a micro-batch. Nothing of it is in the checkpoint.
TEST_F(Stop, SigtermAbandonsALongStep) {
  content_["pipeline"]["micro_batches"] = 64;
  content_["train"]["steps"] = 4;
  const auto train = [&](const RunOptions& options, bool resume) {
    std::vector<std::string> all = arguments();
    if (resume) all.push_back("--resume");
    return test::run_program(all, options);
  };
  const std::string folder = folder_.path("checkpoints");
  EXPECT_EQ(train({}, false).exit_code, 0);
  const std::string undisturbed = losses();
  std::filesystem::remove_all(folder);

  ::setenv("TWOBP_FAIL", "F:step=3:rank=0:seconds=0.3", 1);
  RunOptions options;
  options.signal = SIGTERM;
  options.interrupt_when = step_3_is_under_way;
  content_["train"]["log_every"] = 1;
  const Finished result = train(options, false);
  EXPECT_EQ(result.exit_code, 143);
  EXPECT_LT(result.seconds, 20);
  EXPECT_NE(result.err.find("stopped by SIGTERM after step 2 of 4, checkpoint written"), std::string::npos)
      << result.err;
  EXPECT_EQ(steps_told(), 2U);
  EXPECT_TRUE(has_checkpoint(2));
  ::unsetenv("TWOBP_FAIL");
  EXPECT_EQ(train({}, true).exit_code, 0);
  EXPECT_EQ(losses(), undisturbed);
}

// The evaluation takes half a minute.
TEST_F(Stop, SigtermEndsAnEvaluation) {
  content_["model"]["dim"] = 128;
  content_["data"]["sequence"] = 2048;
  content_["data"]["held_out"] = 0.5;
  content_["train"]["eval_batches"] = 0;
  RunOptions options;
  options.signal = SIGTERM;
  double asked = 0;
  options.interrupt_when = [&](const std::string& out) {
    if (out.find("parameters, ") == std::string::npos) return false;
    ::usleep(500'000);  // the evaluation before training is running
    asked = now_seconds();
    return true;
  };
  const Finished result = test::run_program(arguments(), options);
  EXPECT_EQ(result.exit_code, 143);
  EXPECT_LT(now_seconds() - asked, 15);
  EXPECT_EQ(result.out.find("held-out loss"), std::string::npos) << "it ran to its end: " << result.out;
  EXPECT_NE(result.err.find("stopped by SIGTERM before the first step"), std::string::npos) << result.err;
  EXPECT_EQ(steps_told(), 0U);
}

// The step that runs when the signal is noticed is completed before the checkpoint, too.
TEST_F(Stop, SigtermWhileRanksRunAheadCompletesTheStep) {
  content_["pipeline"]["schedule"] = "zb-h2";
  content_["pipeline"]["run_ahead"] = "on";
  RunOptions options;
  options.signal = SIGTERM;
  options.interrupt_when = [](const std::string& out) { return out.find("step 20/") != std::string::npos; };
  const Finished result = test::run_program(arguments(), options);
  EXPECT_EQ(result.exit_code, 143) << result.err;
  EXPECT_NE(result.err.find("stopped by SIGTERM after step "), std::string::npos) << result.err;
  EXPECT_TRUE(has_checkpoint(steps_told()));
}

// The terminal is closed.
TEST_F(Stop, SighupWritesACheckpoint) {
  RunOptions options;
  options.signal = SIGHUP;
  options.interrupt_when = [](const std::string& out) { return out.find("step 20/") != std::string::npos; };
  const Finished result = test::run_program(arguments(), options);
  EXPECT_EQ(result.exit_code, 129);
  EXPECT_NE(result.err.find("stopped by SIGHUP after step "), std::string::npos) << result.err;
  EXPECT_TRUE(has_checkpoint(steps_told()));
}

TEST_F(Stop, SighupUnderNohupChangesNothing) {
  content_["train"]["steps"] = 300;
  RunOptions options;
  options.signal = SIGHUP;
  options.interrupt_when = [](const std::string& out) { return out.find("step 1/") != std::string::npos; };
  const Finished result = test::run_in_shell("trap '' HUP; exec \"$0\" \"$@\"", arguments(), options);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(steps_told(), 300U);
}

// This is the case of `twobp train ... | head`.
TEST_F(Stop, AReaderThatLeavesEndsItWithACheckpoint) {
  const std::string code = folder_.path("code");
  const Finished result = test::run_in_shell("{ \"$0\" \"$@\"; echo $? > '" + code + "'; } | head -n 6", arguments());
  EXPECT_EQ(test::read_file(code), "141\n");
  EXPECT_NE(result.err.find("stopped by SIGPIPE after step "), std::string::npos) << result.err;
  EXPECT_TRUE(has_checkpoint(steps_told()));
}

TEST_F(Stop, SigtermEndsItDuringStartUp) {
  ASSERT_EQ(::mkfifo(folder_.path("steps.jsonl").c_str(), 0600), 0);  // it has no reader
  RunOptions options;
  options.signal = SIGTERM;
  const double begin = now_seconds();
  options.interrupt_when = [&](const std::string&) { return now_seconds() > begin + 1; };
  const Finished result = test::run_program(arguments(), options);
  EXPECT_EQ(result.exit_code, 143);
  EXPECT_LT(result.seconds, 10);
}

TEST_F(Stop, SigtermEndsItWhileAPipeIsFull) {
  const std::string pipe = folder_.path("steps.jsonl");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const int reader = ::open(pipe.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);  // reads nothing
  ASSERT_GE(::fcntl(reader, F_SETPIPE_SZ, 4096), 0);
  RunOptions options;
  options.signal = SIGTERM;
  options.interrupt_when = [](const std::string& out) {
    if (out.find("step 1/") == std::string::npos) return false;
    ::usleep(1'000'000);  // it waits a few steps later
    return true;
  };
  const Finished result = test::run_program(arguments(), options);
  ::close(reader);
  EXPECT_EQ(result.exit_code, 143);
  EXPECT_LT(result.seconds, 15);
  EXPECT_NE(result.err.find("checkpoint written"), std::string::npos) << result.err;
}

// The limit is that of `ulimit -f`, in blocks of 512 or 1024 bytes. The kernel's signal would end the run without a
// message.
TEST_F(Stop, AFileBeyondTheLimitIsAnErrorThatNamesIt) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the sanitizer maps a file of its own, which the limit cuts off";
#endif
  content_["save"]["every"] = 1;
  const Finished result = test::run_in_shell("ulimit -f 8; exec \"$0\" \"$@\"", arguments());
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(lines_of(result.err).size(), 1U) << result.err;
  EXPECT_NE(result.err.find(folder_.path("checkpoints")), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("File too large"), std::string::npos) << result.err;
}

// Otherwise the first files that are opened would get the numbers of standard input, output and error.
TEST_F(Stop, ClosedDescriptorsGetNoFile) {
  content_["train"]["steps"] = 3;
  const Finished result = test::run_in_shell("exec \"$0\" \"$@\" <&- >&- 2>&-", arguments());
  EXPECT_EQ(result.exit_code, 0);
  const std::vector<std::string> lines = lines_of(test::read_file(folder_.path("steps.jsonl")));
  EXPECT_EQ(lines.size(), 3U);
  for (const std::string& line : lines) EXPECT_TRUE(json::accept(line)) << line;
  EXPECT_EQ(test::read_file(folder_.path("checkpoints/.lock")), "");
}

// The first Ctrl-C waits for the current step. A second one does not.
TEST_F(Stop, SecondInterruptEndsItAtOnce) {
  ::setenv("TWOBP_FAIL", "F:step=3:seconds=300", 1);
  RunOptions options;
  options.signal = SIGINT;
  options.times = 2;
  options.interrupt_when = step_3_is_under_way;
  const Finished result = test::run_program(arguments(), options);
  EXPECT_EQ(result.exit_code, 128 + SIGINT);
  EXPECT_LT(result.seconds, 60);
  EXPECT_EQ(result.err, "");
  EXPECT_FALSE(has_checkpoint(2));
}

TEST_F(Stop, ASecondSigtermLaterEndsItAtOnce) {
  ::setenv("TWOBP_FAIL", "F:step=3:seconds=300", 1);
  RunOptions options;
  options.signal = SIGTERM;
  options.times = 2;
  options.between = 0.8;
  options.interrupt_when = step_3_is_under_way;
  const Finished result = test::run_program(arguments(), options);
  EXPECT_EQ(result.exit_code, 128 + SIGTERM);
  EXPECT_LT(result.seconds, 60);
  EXPECT_EQ(result.err, "");
}

// A launcher and its scheduler may both send the signal.
TEST_F(Stop, TwoSigtermsAtOnceAreOneRequest) {
  RunOptions options;
  options.signal = SIGTERM;
  options.times = 2;
  options.interrupt_when = [](const std::string& out) { return out.find("step 2/") != std::string::npos; };
  const Finished result = test::run_program(arguments(), options);
  EXPECT_EQ(result.exit_code, 128 + SIGTERM);
  EXPECT_NE(result.err.find("checkpoint written"), std::string::npos) << result.err;
}

// Ctrl-Z stops the run for longer than the time-out, while rank 1 waits for rank 0.
TEST_F(Stop, ASuspendedRunGoesOnWhenContinued) {
  ::setenv("TWOBP_FAIL", "F:step=3:rank=0:seconds=0.4", 1);
  content_["train"]["steps"] = 4;
  content_["pipeline"]["timeout"] = 3;
  RunOptions options;
  options.signal = SIGSTOP;
  options.continue_after = 4;
  options.interrupt_when = [](const std::string& out) {
    if (out.find("step 2/") == std::string::npos) return false;
    ::usleep(300'000);  // rank 1 waits by now, because rank 0 sleeps in each of its layers
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
    const Finished result = test::expect_one_message(arguments(), {"a failure on demand, TWOBP_FAIL=" + fault});
    if (where != "loader") {
      EXPECT_NE(result.err.find("rank 1, step 4, "), std::string::npos) << result.err;
    }
    std::filesystem::remove_all(folder_.path("checkpoints"));
  }
}

// One rank hangs. The time-out of another rank ends the process, including the threads that hang.
TEST_F(Stop, ARankThatHangsDoesNotStopTheEnd) {
  ::setenv("TWOBP_FAIL", "F:step=4:rank=0:seconds=300", 1);
  content_["pipeline"]["timeout"] = 1;
  const Finished result =
      test::expect_one_message(arguments(), {"rank 1, step 4, ", "waited 1 s", "from rank 0", "pipeline.timeout"});
  EXPECT_LT(result.seconds, 60);
}

TEST_F(Stop, DataThatDoesNotArriveEndsTheRun) {
  ::setenv("TWOBP_FAIL", "loader:step=4:seconds=300", 1);
  content_["pipeline"]["timeout"] = 1;
  const Finished result =
      test::expect_one_message(arguments(), {"waited 1 s for a batch of the data", "pipeline.timeout"});
  EXPECT_LT(result.seconds, 60);
}

TEST_F(Stop, TruncatedDataIsAnErrorAndTheCheckpointStays) {
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
  EXPECT_NE(result.err.find("tokens.bin: the file was truncated while it was in use"), std::string::npos) << result.err;
  test::expect_success({"checkpoint", "verify", folder_.path("checkpoints")});
}

// There is no update and no step. The losses are those of a run on data without these samples.
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
  const auto losses = [&](const std::string& arrays, int steps, std::vector<std::string> more, const char* warned) {
    content_["data"]["arrays"] = arrays;
    content_["train"]["steps"] = steps;
    std::vector<std::string> all = arguments();
    all.insert(all.end(), more.begin(), more.end());
    const Finished result = test::run_program(all);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.err.find("has no label that counts") != std::string::npos, *warned != '\0') << result.err;
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
  // This run is stopped before the second such batch, and resumed.
  std::filesystem::remove_all(folder_.path("checkpoints"));
  losses(with, 1, {}, "");
  EXPECT_EQ(losses(with, 7, {"--resume"}, "batch 2 of epoch 1, before step 2"), expected);
}

TEST_F(Stop, AnUnknownFailureIsRefused) {
  ::setenv("TWOBP_FAIL", "B:step=4", 1);
  test::expect_one_message(arguments(), {"TWOBP_FAIL=B:step=4", "F, I, W, optimizer or loader"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
