// Tests `srun -n N twobp train` on a Slurm of one node, inside which this test runs (scripts/slurm_node). It checks
// that the numbers are those of one process, the signals that a scheduler sends, and the single reason for an error.
#include <cstdlib>
#include <tuple>
#include <unistd.h>

#include "tests/program/subprocess.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;
using test::Finished;
using test::lines_of;
using test::RunOptions;

class SrunCommand : public ::testing::Test {
 protected:
  void SetUp() override {
    ::setenv("OMP_NUM_THREADS", "1", 1);
    content_["pipeline"] = {
        {"ranks", 2}, {"micro_batches", 4}, {"micro_batch_size", 2}, {"pin", false}, {"timeout", 60}};
    content_["train"]["clip_norm"] = 0.5;
  }
  ~SrunCommand() override { ::unsetenv("TWOBP_FAIL"); }

  std::string config() const { return folder_.write("config.json", content_.dump()); }

  // Runs two tasks. `mpi` is as for srun's --mpi.
  static Finished srun(const std::string& mpi, const std::vector<std::string>& arguments, RunOptions options = {},
                       const std::string& program = TWOBP_PROGRAM) {
    std::vector<std::string> all = {"--mpi=" + mpi, "--job-name=twobp_test", "-n", "2", program};
    all.insert(all.end(), arguments.begin(), arguments.end());
    options.program = "srun";
    options.timeout = 120;
    return test::run_program(all, options);
  }

  std::vector<double> losses_of(const std::string& name) const {
    std::vector<double> losses;
    for (const auto& line : lines_of(test::read_file(folder_.path(name))))
      losses.push_back(json::parse(line).at("loss").get<double>());
    return losses;
  }

  test::TempFolder folder_;
  json content_ = test::tiny_config();
};

TEST_F(SrunCommand, TrainsToTheSameNumbersAsOneProcess) {
  test::expect_success({"train", config(), "--metrics", folder_.path("alone.jsonl")});
  const Finished result = srun("pmix", {"train", config(), "--metrics", folder_.path("srun.jsonl")});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(losses_of("srun.jsonl"), losses_of("alone.jsonl"));
  EXPECT_EQ(losses_of("srun.jsonl").size(), 4U);
}

TEST_F(SrunCommand, SigtermWritesACheckpointForResuming) {
  content_["train"]["steps"] = 1'000'000;
  content_["save"] = {{"checkpoints", folder_.path("checkpoints")}, {"every", 1'000'000}};
  RunOptions options;
  bool sent = false;
  options.interrupt_when = [&](const std::string& out) {
    if (!sent && out.find("step 20/") != std::string::npos)
      sent = std::system("scancel --signal=TERM --name=twobp_test") == 0;
    return false;
  };
  const Finished stopped = srun("pmix", {"train", config(), "--metrics", folder_.path("steps.jsonl")}, options);
  EXPECT_TRUE(sent);
  EXPECT_EQ(stopped.exit_code, 143) << stopped.err;
  const size_t steps = losses_of("steps.jsonl").size();
  EXPECT_NE(stopped.err.find(concat("stopped by SIGTERM after step ", steps, " of 1000000, checkpoint written")),
            std::string::npos)
      << stopped.err;
  const Finished resumed =
      srun("pmix", {"train", config(), "--resume", "auto", "--set", concat("train.steps=", steps + 2)});
  EXPECT_EQ(resumed.exit_code, 0) << resumed.err;
  EXPECT_NE(resumed.out.find(concat("step ", steps + 1, "/", steps + 2)), std::string::npos) << resumed.out;
}

// As in docs/cluster.md: the time limit's signal ends the run with a checkpoint, and the requeued job goes on from it.
TEST_F(SrunCommand, ATimeLimitLeavesACheckpointForTheRequeuedJob) {
  content_["train"]["steps"] = 1'000'000;
  content_["save"] = {{"checkpoints", folder_.path("checkpoints")}, {"every", 1'000'000}};
  const std::string log = folder_.path("run.log");
  const std::string script =
      folder_.write("job.sh", concat("#!/bin/bash\n#SBATCH --ntasks=2\n#SBATCH --time=1\n#SBATCH --signal=TERM@55\n",
                                     "#SBATCH --requeue\n#SBATCH --open-mode=append\n#SBATCH --output=", log, "\n",
                                     "srun --mpi=pmix ", TWOBP_PROGRAM, " train ", config(), " --resume auto\n"));
  const auto ask = [&](const std::string& command) {
    EXPECT_EQ(std::system(concat(command, " > ", folder_.path("answer")).c_str()), 0) << command;
    return test::read_file(folder_.path("answer"));
  };
  std::string job = ask(concat("sbatch --parsable ", script));
  job.erase(job.find('\n'));
  const auto state = [&] { return ask(concat("scontrol --oneliner show job ", job)); };
  const auto wait_for_end = [&](const std::string& end) {
    for (int i = 0; i < 2000 && state().find(concat("JobState=", end)) == std::string::npos; ++i) ::usleep(100'000);
    return state();
  };
  EXPECT_NE(wait_for_end("FAILED").find("ExitCode=143:0"), std::string::npos) << state() << test::read_file(log);
  const std::string first = test::read_file(log);
  const std::string said = "stopped by SIGTERM after step ";
  const size_t at = first.find(said);
  ASSERT_NE(at, std::string::npos) << first;
  EXPECT_NE(first.find(" of 1000000, checkpoint written", at), std::string::npos) << first;
  const int steps = std::stoi(first.substr(at + said.size()));
  content_["train"]["steps"] = steps + 2;
  config();
  // Slurm refuses both commands while it cleans up, and would start the job two minutes later.
  const auto tell = [&](const std::string& command) {
    std::ignore = std::system((command + " > /dev/null 2>&1").c_str());
  };
  for (int i = 0; i < 120 && state().find("JobState=COMPLETED") == std::string::npos; ++i, ::sleep(1)) {
    if (state().find("JobState=FAILED") != std::string::npos) tell(concat("scontrol requeue ", job));
    if (state().find("JobState=PENDING") != std::string::npos)
      tell(concat("scontrol update JobId=", job, " StartTime=now"));
  }
  const std::string both = test::read_file(log);
  EXPECT_NE(both.find(concat("step ", steps + 1, "/", steps + 2)), std::string::npos) << state() << both;
  EXPECT_EQ(both.find(concat("step ", steps, "/", steps + 2)), std::string::npos) << "a step was repeated";
}

TEST_F(SrunCommand, ATaskThatFailsEndsAll) {
  ::setenv("TWOBP_FAIL", "I:step=3:rank=1", 1);
  const Finished result = srun("pmix", {"train", config()});
  EXPECT_NE(result.exit_code, 0);
  EXPECT_LT(result.seconds, 30);
  EXPECT_NE(result.err.find("rank 1, step 3"), std::string::npos) << result.err;
}

TEST_F(SrunCommand, AKilledTaskEndsAll) {
  ::setenv("TWOBP_FAIL", "I:step=3:rank=1:kill=1", 1);
  content_["pipeline"]["timeout"] = 10;
  const Finished result = srun("pmix", {"train", config()});
  EXPECT_NE(result.exit_code, 0);
  EXPECT_LT(result.seconds, 60);
  EXPECT_NE(result.err.find("task 1: Killed"), std::string::npos) << result.err;
}

// Its processes meet at an address that the first one gives.
TEST_F(SrunCommand, ThePackageHasTheNumbersOfOneProcess) {
  const char* python = std::getenv("TWOBP_PYTHON");
  const std::string interpreter = python == nullptr ? "python3" : python;
  if (std::system((interpreter + " -c 'import torch' > /dev/null 2>&1").c_str()) != 0)
    GTEST_SKIP() << interpreter << " has no PyTorch";
  ::setenv("PYTHONPATH", TWOBP_PACKAGE, 1);
  const std::string script = folder_.write("train.py", R"(
import torch, twobp
processes = twobp.init_process_group()
batch = {name: torch.randn(8, 8, generator=torch.Generator().manual_seed(1)) for name in ("input", "target")}
example = {name: tensor[:2] for name, tensor in batch.items()}
trainer = twobp.Trainer(model={"type": "mlp", "dim": 8, "layers": 4}, example=example, ranks=2, micro_batches=4, pin=False)
losses = [trainer.step(batch).loss for _ in range(3)]
if processes == 1 or torch.distributed.get_rank() == 0:
    print(processes, *losses)
)");
  RunOptions options;
  options.program = interpreter;
  const Finished alone = test::run_program({script}, options);
  ASSERT_EQ(alone.exit_code, 0) << alone.err;
  const Finished many = srun("none", {script}, {}, interpreter);
  ASSERT_EQ(many.exit_code, 0) << many.err;
  ASSERT_EQ(alone.out.substr(0, 2), "1 ");
  EXPECT_EQ(many.out, "2 " + alone.out.substr(2));
}

TEST_F(SrunCommand, SaysWhichOptionIsMissing) {
  const Finished result = srun("none", {"train", config()});
  EXPECT_NE(result.exit_code, 0);
  EXPECT_NE(result.err.find("srun --mpi=pmix"), std::string::npos) << result.err;
  EXPECT_EQ(result.err.find("PMI support"), std::string::npos) << "MPI's own words: " << result.err;
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
