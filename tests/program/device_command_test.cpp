// `twobp train` in several processes with devices of their own: the program is linked with the stand-in device and
// loads the stand-in for NCCL. They have the bits of one process; and whatever breaks, or was started wrongly, ends all
// of them, each with one message.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>

#include "tests/program/subprocess.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;
using test::Finished;
using test::lines_of;
using test::Process;
using test::RunOptions;
using test::TempFolder;

// With this folder before what is there.
std::string library_path(const std::string& folder) {
  const char* old = std::getenv("LD_LIBRARY_PATH");
  return concat("LD_LIBRARY_PATH=", folder, old == nullptr ? "" : concat(":", old));
}

class DeviceCommand : public ::testing::Test {
 protected:
  DeviceCommand() {
    content_["pipeline"] = {{"ranks", 2},   {"micro_batches", 4}, {"micro_batch_size", 2},
                            {"pin", false}, {"timeout", 60},      {"device", "privateuseone"}};
    content_["model"]["tied"] = true;
    content_["train"] = {{"clip_norm", 0.5}, {"steps", 3}, {"log_every", 1}};
  }

  std::vector<std::string> arguments() const { return {"train", folder_.write("config.json", content_.dump())}; }
  std::vector<std::string> environment() const {
    return {concat("TMPDIR=", folder_.path("")), library_path(TWOBP_STAND_IN_NCCL), "TWOBP_STAND_IN_LOADS=1",
            "OMP_NUM_THREADS=1"};
  }
  Finished alone(const std::vector<std::string>& arguments, const std::vector<std::string>& more = {}) const {
    RunOptions options;
    options.environment = environment();
    options.environment.insert(options.environment.end(), more.begin(), more.end());
    return test::run_program(arguments, options);
  }

  std::vector<Finished> start(std::vector<Process> processes, const std::vector<std::string>& arguments,
                              std::atomic<int>& ended) const {
    for (Process& process : processes) process.options.environment = environment();
    return test::run_processes(processes, arguments, ended);
  }
  std::vector<Finished> start(const std::vector<Process>& processes, const std::vector<std::string>& arguments) const {
    std::atomic<int> ended = 0;
    return start(processes, arguments, ended);
  }

  json numbers_of(const std::string& metrics) const {
    json steps;
    for (const auto& line : lines_of(test::read_file(folder_.path(metrics)))) {
      const json step = json::parse(line);
      steps.push_back({step.at("step"), step.at("loss"), step.at("grad_norm")});
    }
    return steps;
  }
  // Each tensor's description and bytes, by name. Each process writes a file.
  std::map<std::string, std::string> weights_of(const std::string& folder) const {
    std::map<std::string, std::string> weights;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path(folder))) {
      if (entry.path().extension() != ".safetensors") continue;
      const std::string text = test::read_file(entry.path());
      uint64_t head = 0;
      std::memcpy(&head, text.data(), sizeof(head));
      const json tensors = json::parse(text.substr(sizeof(head), head));
      for (const auto& [name, tensor] : tensors.items()) {
        if (name == "__metadata__") continue;
        const auto [begin, end] = tensor.at("data_offsets").get<std::pair<size_t, size_t>>();
        weights[name] =
            concat(tensor.at("dtype"), tensor.at("shape"), text.substr(sizeof(head) + head + begin, end - begin));
      }
    }
    return weights;
  }
  std::vector<std::string> saves_to(const std::string& name) const {
    auto all = arguments();
    const std::vector<std::string> more = {"--metrics", folder_.path(name + ".jsonl"), "--set",
                                           concat("save.model=", folder_.path(name))};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  void expect_same_runs(const std::string& name = "many") const {
    EXPECT_EQ(numbers_of("alone.jsonl").size(), content_.at("train").at("steps").get<size_t>());
    EXPECT_EQ(numbers_of(name + ".jsonl"), numbers_of("alone.jsonl")) << name;
    const auto weights = weights_of("alone");
    EXPECT_GT(weights.size(), 10U);
    EXPECT_TRUE(weights_of(name) == weights) << name;
  }
  void run_alone() const {
    const Finished expected = alone(saves_to("alone"));
    ASSERT_EQ(expected.exit_code, 0) << expected.err;
  }
  void run_many(int processes, const std::vector<std::string>& arguments) const {
    for (const Finished& one : start(std::vector<Process>(processes), arguments)) {
      EXPECT_EQ(one.exit_code, 0) << one.err;
      EXPECT_EQ(one.err, "");
    }
  }
  void expect_bits_of_one_process(int processes) const {
    run_alone();
    run_many(processes, saves_to("many"));
    expect_same_runs();
  }

  TempFolder folder_;
  json content_ = test::tiny_config();
};

TEST_F(DeviceCommand, TwoProcesses) {
  content_["pipeline"]["schedule"] = "1f1b";
  expect_bits_of_one_process(2);
}

TEST_F(DeviceCommand, FourProcessesWithReplicas) {
  content_["model"]["layers"] = 4;
  content_["pipeline"]["data_parallel"] = 2;
  content_["pipeline"]["schedule"] = "zb-v";
  content_["optimizer"]["shard"] = true;
  expect_bits_of_one_process(4);
}

// No process uses the GPU of another one, which may refuse this.
TEST_F(DeviceCommand, EachProcessOpensItsOwnGpuAlone) {
  const auto finished = start({{{"TWOBP_STAND_IN_TAKEN=1"}}, {{"TWOBP_STAND_IN_TAKEN=0"}}}, saves_to("many"));
  for (const Finished& one : finished) EXPECT_EQ(one.exit_code, 0) << one.err;
}

TEST_F(DeviceCommand, SeveralRanksInEachProcess) {
  content_["pipeline"]["data_parallel"] = 2;
  expect_bits_of_one_process(2);
}

TEST_F(DeviceCommand, APipelineOverProcessesOfSeveralRanks) {
  content_["pipeline"]["ranks"] = 4;
  expect_bits_of_one_process(2);
}

// A run of four processes breaks in its fourth step, after a checkpoint of the second. Resumed, it has the bits of a
// run that was not interrupted: in four processes and in one.
TEST_F(DeviceCommand, AResumedRunEqualsAnUninterruptedRun) {
  content_["pipeline"]["data_parallel"] = 2;
  content_["pipeline"]["schedule"] = "zb-v";
  content_["optimizer"]["shard"] = true;
  content_["train"]["steps"] = 5;
  run_alone();
  content_["save"] = {{"checkpoints", folder_.path("checkpoints")}, {"every", 2}};
  const Process failing = {{"TWOBP_FAIL=F:step=4:rank=1:replica=1"}};
  for (const Finished& one : start(std::vector<Process>(4, failing), saves_to("many")))
    EXPECT_NE(one.exit_code, 0) << one.out;
  ASSERT_TRUE(std::filesystem::exists(folder_.path("checkpoints/step-00000002")));
  std::filesystem::copy(folder_.path("checkpoints"), folder_.path("copy"), std::filesystem::copy_options::recursive);
  std::filesystem::copy(folder_.path("many.jsonl"), folder_.path("one.jsonl"));

  auto resumed = saves_to("many");
  resumed.emplace_back("--resume");
  run_many(4, resumed);
  expect_same_runs("many");

  resumed = saves_to("one");
  resumed.insert(resumed.end(), {concat("save.checkpoints=", folder_.path("copy")), "--resume"});
  const Finished one = alone(resumed);
  ASSERT_EQ(one.exit_code, 0) << one.err;
  EXPECT_NE(one.out.find("resumed after step 2"), std::string::npos) << one.out;
  expect_same_runs("one");
}

// ---- the other commands

TEST_F(DeviceCommand, MeasuresOnItsDevice) {
  const std::string config = arguments().back();
  const std::string costs = folder_.path("costs.json");
  for (const std::vector<std::string>& command :
       std::vector<std::vector<std::string>>{{"profile", config, "--seconds", "0.01", "--json", costs},
                                             {"plan", config, "--seconds", "0.01"},
                                             {"bench", config, "--repeat", "1", "--steps", "1"},
                                             {"eval", config}}) {
    const Finished done = alone(command);
    EXPECT_EQ(done.exit_code, 0) << command.front() << ": " << done.err;
    EXPECT_EQ(done.err, "") << command.front();
    EXPECT_NE(done.out, "") << command.front();
  }
  EXPECT_NE(test::read_file(costs).find("stand-in"), std::string::npos) << "names the device";
}

#ifdef TWOBP_MPIRUN
class DeviceCommandUnderMpirun : public DeviceCommand {
 protected:
  // The others end when one ends with an error.
  Finished mpirun(int processes, const std::vector<std::string>& arguments) const {
    std::vector<std::string> all = split(TWOBP_MPIRUN_FLAGS, ' ');
    all.insert(all.end(), {"-n", std::to_string(processes), "env"});
    const auto variables = environment();
    all.insert(all.end(), variables.begin(), variables.end());
    all.emplace_back(TWOBP_PROGRAM);
    all.insert(all.end(), arguments.begin(), arguments.end());
    RunOptions options;
    options.program = TWOBP_MPIRUN;
    return test::run_program(all, options);
  }
  // mpirun adds lines of its own.
  static void expect_refusal(const Finished& finished, int processes, const std::string& message) {
    EXPECT_EQ(finished.exit_code, 1);
    EXPECT_LT(finished.seconds, 20);
    std::set<std::string> refusals;  // one for each process that mpirun has not ended before
    for (const std::string& line : lines_of(finished.err)) {
      if (line.find("twobp: error: ") == std::string::npos) continue;
      EXPECT_NE(line.find(message), std::string::npos) << line;
      EXPECT_TRUE(refusals.insert(line).second) << "twice: " << line;
    }
    EXPECT_GE(refusals.size(), 1U) << finished.err;
    EXPECT_LE(refusals.size(), static_cast<size_t>(processes)) << finished.err;
  }
};

TEST_F(DeviceCommandUnderMpirun, HasTheBitsOfOneProcess) {
  run_alone();
  const Finished result = mpirun(2, saves_to("many"));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  expect_same_runs();
}

TEST_F(DeviceCommandUnderMpirun, RefusesWhatMpiCannotCarry) {
  auto all = arguments();
  all.insert(all.end(), {"--set", "pipeline.transport=mpi"});
  expect_refusal(mpirun(2, all), 2, "pipeline.transport is \"mpi\", which carries what lies in a CPU's memory");
}

TEST_F(DeviceCommandUnderMpirun, RefusesSeveralRanksAProcess) {
  content_["pipeline"]["ranks"] = 4;
  expect_refusal(mpirun(2, arguments()), 2,
                 "mpirun started 2 processes for 4 ranks, but over MPI each process has one rank: start 4");
}
#endif

// ---- something breaks within the second step, whose sums between replicas are under way

class DeviceFault : public DeviceCommand {
 protected:
  DeviceFault() {
    content_["pipeline"]["data_parallel"] = 2;
    content_["pipeline"]["timeout"] = 5;
    content_["train"]["steps"] = 1000;
  }

  // Process 3 sleeps in a W of the second step. Once it does, it gets the signal.
  std::vector<Finished> strike(int signal) const {
    std::atomic<bool> begun = false;
    std::vector<Process> processes(4);
    for (Process& process : processes) process.environment = {"TWOBP_FAIL=W:step=2:rank=1:replica=1:seconds=60"};
    processes[0].options.interrupt_when = [&](const std::string& out) {
      if (out.find("step 1/") != std::string::npos) begun = true;
      return false;
    };
    processes[3].options.interrupt_when = [&](const std::string&) {
      if (!begun) return false;
      ::usleep(300'000);
      return true;
    };
    processes[3].options.signal = signal;
    std::atomic<int> ended = 0;
    processes[3].options.kill_when = [&] { return ended == 3; };
    return start(processes, arguments(), ended);
  }

  // The first process that waited in vain reports it. The others end because it did, and say the same.
  static void expect_survivors_to_end(const std::vector<Finished>& finished) {
    int reports = 0;
    for (size_t i = 0; i < 3; ++i) {
      const Finished& one = finished[i];
      EXPECT_TRUE(one.exit_code == 1 || one.exit_code == 3) << i << ": " << one.exit_code << one.err;
      EXPECT_EQ(lines_of(one.err).size(), 1U) << i << ": " << one.err;
      EXPECT_LT(one.seconds, 30) << i;
      if (one.exit_code == 1) ++reports;
      EXPECT_NE(one.err.find(" 5 s"), std::string::npos) << "says what was waited for: " << one.err;
    }
    EXPECT_EQ(reports, 1) << finished[0].err << finished[1].err << finished[2].err;
  }
};

TEST_F(DeviceFault, AnErrorIsReportedByItsProcess) {
  const Process failing = {{"TWOBP_FAIL=W:step=2:rank=1:replica=1"}};
  const auto finished = start(std::vector<Process>(4, failing), arguments());
  for (size_t i = 0; i < 4; ++i) {
    const Finished& one = finished[i];
    EXPECT_EQ(one.exit_code, i == 3 ? 1 : 3) << one.err;
    EXPECT_EQ(lines_of(one.err).size(), 1U) << i << ": " << one.err;
    EXPECT_NE(one.err.find("rank 1, step 2"), std::string::npos) << i << ": " << one.err;
    EXPECT_LT(one.seconds, 30);
  }
}

// Each fails by itself, at the same time.
TEST_F(DeviceFault, ProcessesThatFailTogetherGiveOneReport) {
  std::vector<Process> processes(4);
  for (size_t i = 0; i < 4; ++i)
    processes[i].environment = {concat("TWOBP_FAIL=optimizer:step=2:rank=", i % 2, ":replica=", i / 2)};
  const auto finished = start(processes, arguments());
  const auto reason_of = [](const Finished& one) {
    const size_t at = one.err.find("rank ", one.err.find(" stopped: ") + 1);
    return one.err.substr(at, one.err.find(" (process") - at);
  };
  std::string reason;
  for (const Finished& one : finished) {
    if (one.exit_code != 1) continue;
    EXPECT_EQ(reason, "") << "a second report: " << one.err;
    reason = lines_of(reason_of(one)).at(0);
  }
  EXPECT_NE(reason.find("step 2"), std::string::npos) << reason;
  for (const Finished& one : finished) {
    EXPECT_TRUE(one.exit_code == 1 || one.exit_code == 3) << one.exit_code << one.err;
    EXPECT_EQ(lines_of(one.err).size(), 1U) << one.err;
    EXPECT_NE(one.err.find(reason), std::string::npos) << one.err;
    EXPECT_LT(one.seconds, 30);
  }
}

TEST_F(DeviceFault, AKilledProcessEndsAll) {
  const auto finished = strike(SIGKILL);
  EXPECT_EQ(finished[3].exit_code, 128 + SIGKILL);
  expect_survivors_to_end(finished);
}

TEST_F(DeviceFault, AFrozenProcessEndsTheOthers) {
  expect_survivors_to_end(strike(SIGSTOP));
}

// As above, when the others wait in a sum that NCCL makes.
TEST_F(DeviceFault, AKilledProcessEndsASumByNccl) {
  content_["pipeline"]["sums"] = "nccl";
  const auto finished = strike(SIGKILL);
  EXPECT_EQ(finished[3].exit_code, 128 + SIGKILL);
  expect_survivors_to_end(finished);
}

// The process that runs the store is gone, so the others cannot ask who was first.
TEST_F(DeviceFault, TheEndOfTheStoreEndsAll) {
  std::vector<Process> processes(4);
  processes[0].options.interrupt_when = [](const std::string& out) { return out.find("step 1/") != std::string::npos; };
  processes[0].options.signal = SIGKILL;
  const auto finished = start(processes, arguments());
  EXPECT_EQ(finished[0].exit_code, 128 + SIGKILL);
  for (size_t i = 1; i < 4; ++i) {
    const Finished& one = finished[i];
    EXPECT_TRUE(one.exit_code == 1 || one.exit_code == 3) << i << ": " << one.exit_code << one.err;
    EXPECT_EQ(lines_of(one.err).size(), 1U) << i << ": " << one.err;
    EXPECT_LT(one.seconds, 30) << i;
  }
}

// ---- started wrongly

// All end with this message, and nothing else.
void expect_refusal(const std::vector<Finished>& finished, const std::vector<std::string>& parts) {
  for (const Finished& one : finished) {
    EXPECT_EQ(one.exit_code, 1) << one.err;
    EXPECT_EQ(lines_of(one.err).size(), 1U) << one.err;
    for (const std::string& part : parts)
      EXPECT_NE(one.err.find(part), std::string::npos) << "no \"" << part << "\" in: " << one.err;
    EXPECT_LT(one.seconds, 20);
  }
}

TEST_F(DeviceCommand, WithoutNccl) {
  const Process without = {{library_path("/nowhere")}};
  expect_refusal(start({without, without}, arguments()), {"rank 0 on ", "NCCL is not available"});
  expect_refusal(start({{}, without}, arguments()), {"rank 1 on ", "NCCL is not available"});
}

TEST_F(DeviceCommand, WithoutAGpu) {
  const Process without = {{"TWOBP_STAND_IN_DEVICES=0"}};
  const std::vector<std::string> parts = {"no privateuseone device is visible", "CUDA_VISIBLE_DEVICES",
                                          "pipeline.device = \"cpu\""};
  expect_refusal(start({without, without}, arguments()), parts);
  expect_refusal(start({{}, without}, arguments()), parts);
  expect_refusal({alone(arguments(), without.environment)}, parts);
}

TEST_F(DeviceCommand, FewerGpusThanRanks) {
  const Process few = {{"TWOBP_STAND_IN_DEVICES=1"}};
  expect_refusal(start({few, few}, arguments()),
                 {"ranks 0 and 1 on ", "share a GPU (device 0)", "1 GPU is visible for 2 ranks: start fewer ranks"});
  content_["pipeline"]["data_parallel"] = 2;  // each process has two ranks
  expect_refusal(start({few, few}, arguments()),
                 {"ranks 0 and 1 on ", "share a GPU (device 0)", "1 GPU is visible for 4 ranks: start fewer ranks"});
}

TEST_F(DeviceCommand, EqualLocalRanks) {
  const Process first = {{"LOCAL_RANK=0"}};
  expect_refusal(start({first, first}, arguments()),
                 {"ranks 0 and 1 on ", "share a GPU (device 0)",
                  "both processes have local rank 0, though 64 GPUs are visible for 2 ranks"});
}

TEST_F(DeviceCommand, AGraphOfSeveralProcesses) {
  content_["pipeline"]["graphs"] = true;
  expect_refusal(start({{}, {}}, arguments()),
                 {"pipeline.graphs is set, but torchrun started 2 processes", "set it to false"});
}

TEST_F(DeviceCommand, SumsByNcclInOneProcess) {
  content_["pipeline"]["data_parallel"] = 2;
  content_["pipeline"]["sums"] = "nccl";
  const std::vector<std::string> parts = {"pipeline.sums is \"nccl\"", "threads of this process", "\"auto\""};
  expect_refusal({alone(arguments())}, parts);
  content_["pipeline"]["device"] = "cpu";
  expect_refusal({alone(arguments())}, {"pipeline.sums is \"nccl\"", "pipeline.device is \"cpu\""});
}

TEST_F(DeviceCommand, GpusOfDifferentKinds) {
  const Process other = {{"TWOBP_STAND_IN_MODEL=other"}};
  expect_refusal(start({{}, other}, arguments()),
                 {"rank 0 computes on a GPU of model \"stand-in\"", "rank 1 on ", "\"other\""});
}

TEST_F(DeviceCommand, ANumberOfProcessesThatDoesNotFit) {
  expect_refusal(start(std::vector<Process>(3), arguments()),
                 {"3 processes were started", "pipeline.ranks 2 x pipeline.data_parallel 1 = 2"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
