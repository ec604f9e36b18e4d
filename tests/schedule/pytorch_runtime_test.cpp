// Schedules written here load and run in PyTorch's own pipeline runtime, a process per rank over Gloo, with
// the gradients of plain autograd. Skipped where Python has no PyTorch.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <sys/wait.h>

#include <gtest/gtest.h>

#include "tests/schedule/support.h"
#include "twobp/schedule/csv.h"
#include "twobp/schedule/lower.h"
#include "twobp/schedule/named_schedules.h"

namespace twobp {
namespace {

// Double precision, and at most 8 micro-batches added in another order.
constexpr double kTolerance = 1e-12;

std::string python() {
  const char* given = std::getenv("TWOBP_PYTHON");
  return given != nullptr && *given != '\0' ? given : "python3";
}

// What the command prints, errors included.
std::string output_of(const std::string& command, int& exit_code) {
  FILE* pipe = ::popen((command + " 2>&1").c_str(), "r");
  std::string out;
  std::array<char, 4096> buffer{};
  for (size_t n = 0; (n = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0;)
    out.append(buffer.data(), n);
  const int status = ::pclose(pipe);
  exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128;
  return out;
}

TEST(PyTorchRuntime, RunsOurSchedules) {
  int exit_code = 0;
  const std::string imported = output_of(
      python() + " -c 'from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime'",
      exit_code);
  if (exit_code != 0) GTEST_SKIP() << "Python has no torch.distributed.pipelining: " << imported;

  std::string command = python() + " " TWOBP_SOURCE_DIR "/tests/schedule/pytorch_runtime.py";
  std::vector<std::string> files;
  const auto add = [&](const std::string& name, const Schedule& schedule) {
    for (const CsvForm form : {CsvForm::kCompute, CsvForm::kCommunication}) {
      const std::string path = concat(::testing::TempDir(), "twobp_", name, "_", csv_form_name(form), ".csv");
      std::ofstream(path) << to_csv(schedule, form);
      command += concat(" '", csv_form_name(form), ":", path, "'");
      files.push_back(path);
    }
  };
  add("1f1b_placed", make_schedule("1f1b", 2, 4, P2Policy::kCooldown));
  const Schedule fill = make_schedule("1f1b", 2, 4, P2Policy::kFill);
  add("1f1b_fill", lower(fill, simulate(fill, std::vector<StageCost>(2))));
  add("zb-v", make_schedule("zb-v", 4, 4, P2Policy::kPlaced));
  add("interleaved", make_schedule("interleaved-1f1b", 4, 4, P2Policy::kOff));
  add("interleaved_placed", make_schedule("interleaved-1f1b", 4, 4, P2Policy::kCooldown));

  const std::string out = output_of("timeout 300 " + command, exit_code);
  ASSERT_EQ(exit_code, 0) << out;
  int checked = 0;
  std::istringstream lines(out);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string file;
    std::string form;
    int ranks = 0;
    double error = 1;
    if (!(words >> file >> form >> ranks >> error) || !file.starts_with("twobp_")) continue;
    EXPECT_EQ(ranks, 2) << line;
    EXPECT_LE(error, kTolerance) << line;
    ++checked;
  }
  EXPECT_EQ(checked, static_cast<int>(files.size())) << out;
  for (const auto& file : files) std::remove(file.c_str());
}

}  // namespace
}  // namespace twobp
