// Tests `mpirun -n N twobp train` from outside. The numbers are those of one process and appear once. A wrong start
// ends all processes with one reason.
#include <cstdlib>
#include <set>

#include "tests/program/subprocess.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;
using test::Finished;
using test::read_file;
using test::TempFolder;
using test::tiny_config;

size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

class MpiCommand : public test::InAFolder {
 protected:
  void SetUp() override {
    ::setenv("OMP_NUM_THREADS", "1", 1);
    content_["pipeline"] = {{"ranks", 2}, {"micro_batches", 4}, {"micro_batch_size", 2}, {"pin", false}};
    content_["model"]["tied"] = true;
    content_["train"]["clip_norm"] = 0.5;
  }

  std::string config(const json& content, const std::string& name = "config.json") const {
    return folder_.write(name, content.dump());
  }

  // Each entry has the arguments of one process.
  static Finished mpirun(const std::vector<std::vector<std::string>>& processes) {
    std::vector<std::string> arguments = split(TWOBP_MPIRUN_FLAGS, ' ');
    for (size_t i = 0; i < processes.size(); ++i) {
      if (i > 0) arguments.emplace_back(":");
      arguments.insert(arguments.end(), {"-n", "1", TWOBP_PROGRAM});
      arguments.insert(arguments.end(), processes[i].begin(), processes[i].end());
    }
    test::RunOptions options;
    options.program = TWOBP_MPIRUN;
    options.timeout = 120;
    return test::run_program(arguments, options);
  }
  static Finished mpirun(int processes, const std::vector<std::string>& arguments) {
    return mpirun(std::vector<std::vector<std::string>>(processes, arguments));
  }

  void expect_same_numbers(int processes, const json& content) const {
    const std::string path = config(content);
    test::expect_success({"train", path, "--metrics", folder_.path("alone.jsonl"), "--set",
                          concat("save.model=", folder_.path("alone"))});
    const Finished result = mpirun(processes, {"train", path, "--metrics", folder_.path("mpi.jsonl"), "--set",
                                               concat("save.model=", folder_.path("mpi"))});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(count_of(result.out, "held-out loss before training"), 1U) << result.out;
    EXPECT_EQ(count_of(result.out, "step 4/4"), 1U) << result.out;
    // mpirun gives each process a terminal of its own, but this text goes to a file.
    EXPECT_EQ(result.out.find_first_of("\r\x1b"), std::string::npos) << result.out;
    const auto alone = metrics_of("alone.jsonl");
    const auto many = metrics_of("mpi.jsonl");
    ASSERT_EQ(many.size(), alone.size());
    for (size_t i = 0; i < many.size(); ++i) {
      for (const char* key : {"step", "loss", "grad_norm", "lr", "tokens"}) {
        EXPECT_EQ(many[i].at(key), alone[i].at(key)) << key << " of step " << i + 1;
      }
      // The first process has the times and bytes of the others.
      ASSERT_EQ(many[i].at("idle_fraction").size(), alone[i].at("idle_fraction").size());
      for (const auto& idle : many[i].at("idle_fraction")) EXPECT_LT(idle.get<double>(), 1);
      for (const auto& peak : many[i].at("peak_bytes")) EXPECT_GT(peak.get<int64_t>(), 0);
    }
  }

  json content_ = tiny_config();
};

// MPI_Init waits for a process that never calls it.
TEST_F(MpiCommand, ARankThatNeverComesIsToldFromThoseThatWait) {
  std::vector<std::string> arguments = split(TWOBP_MPIRUN_FLAGS, ' ');
  arguments.insert(arguments.end(),
                   {"-n", "1", TWOBP_PROGRAM, "train", config(content_), ":", "-n", "1", "sleep", "23"});
  test::RunOptions options;
  options.program = TWOBP_MPIRUN;
  const Finished result = test::run_program(arguments, options);
  EXPECT_NE(result.exit_code, 0);
  EXPECT_NE(result.err.find("rank 0 of 2 has waited 20 s in MPI_Init: the ranks that do not say this"),
            std::string::npos)
      << result.err;
}

TEST_F(MpiCommand, TrainsToTheSameNumbersAsOneProcess) {
  expect_same_numbers(2, content_);
}

TEST_F(MpiCommand, TrainsReplicasToTheSameNumbersAsThreads) {
  content_["pipeline"]["data_parallel"] = 2;
  expect_same_numbers(4, content_);
}

TEST_F(MpiCommand, WritesATraceOfAllRanks) {
  const Finished result = mpirun(2, {"train", config(content_), "--trace", folder_.path("trace.json")});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const json trace = json::parse(read_file(folder_.path("trace.json")));
  std::set<int> ranks;  // ranks that ran W
  for (const json& event : trace) {
    if (event.value("cat", "") == "W") ranks.insert(event.at("tid").get<int>());
  }
  EXPECT_EQ(ranks.size(), 2U);
}

// All processes end soon and say why.
void expect_failure(const Finished& result, const std::vector<std::string>& parts) {
  EXPECT_NE(result.exit_code, 0);
  EXPECT_LT(result.seconds, 60);
  for (const auto& part : parts) {
    EXPECT_NE(result.err.find(part), std::string::npos) << "no \"" << part << "\" in: " << result.err;
  }
}

TEST_F(MpiCommand, SaysHowManyProcessesAreNeeded) {
  expect_failure(mpirun(3, {"train", config(content_)}),
                 {"3 processes were started, but pipeline.ranks 2 x pipeline.data_parallel 1 = 2"});
}

TEST_F(MpiCommand, NamesTheKeyAndTheRankThatDiffer) {
  const std::string path = config(content_);
  expect_failure(mpirun({{"train", path}, {"train", path, "--set", "optimizer.lr=0.5"}}),
                 {"optimizer.lr is 0.001 on rank 0, but 0.5 on rank 1"});
}

TEST_F(MpiCommand, RefusesTooManyProcessesForThreads) {
  expect_failure(mpirun(2, {"train", config(content_), "--set", "pipeline.transport=threads"}),
                 {"pipeline.transport is \"threads\", but mpirun started 2 processes"});
}

TEST_F(MpiCommand, OtherCommandsRunInOneProcess) {
  expect_failure(mpirun(2, {"eval", config(content_)}), {"`twobp eval` is for one process"});
}

TEST_F(MpiCommand, RefusesMoreStagesThanLayers) {
  content_["pipeline"]["ranks"] = 4;  // an embedding, 2 blocks of 2, a head: 6 layers for 8 stages
  content_["pipeline"]["schedule"] = "zb-v";
  expect_failure(mpirun(4, {"train", config(content_)}), {"6 layers", "8"});
}

TEST(NoLauncher, MpiNeedsOne) {
  TempFolder folder;
  const std::string path = folder.write("config.json", tiny_config().dump());
  test::expect_one_message({"train", path, "--set", "pipeline.transport=mpi"},
                           {"pipeline.transport is \"mpi\"", "start 2 by mpirun"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
