// Tests that our schedules load and run in PyTorch's own pipeline runtime, with a process per rank over Gloo.
// The gradients are those of plain autograd. The test is skipped if Python has no PyTorch.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <sys/wait.h>

#include <gtest/gtest.h>

#include "tests/schedule/support.h"
#include "twobp/schedule/csv.h"
#include "twobp/schedule/named_schedules.h"

namespace twobp::TWOBP_FILE {
namespace {

// The tests use double precision. At most 12 micro-batches are added in another order.
constexpr double kTolerance = 1e-12;
constexpr int kSkipped = 77;

std::string python() {
  const char* given = std::getenv("TWOBP_PYTHON");
  return given != nullptr && *given != '\0' ? given : "python3";
}

// Returns the output of the command, including errors.
std::string output_of(const std::string& command, int& exit_code) {
  FILE* pipe = ::popen((command + " 2>&1").c_str(), "r");
  std::string out;
  std::array<char, 4096> buffer{};
  for (size_t n = 0; (n = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) out.append(buffer.data(), n);
  const int status = ::pclose(pipe);
  exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128;
  return out;
}

TEST(PyTorchRuntime, RunsOurSchedules) {
  std::string command = python() + " " TWOBP_SOURCE_DIR "/tests/schedule/pytorch_runtime.py";
  std::map<std::string, int> ranks_of;  // by file
  std::vector<std::string> files;
  const auto add = [&](const std::string& name, const Schedule& schedule) {
    const std::string file = concat("twobp_", name, '_', schedule.rank_count(), ".csv");
    files.push_back(::testing::TempDir() + file);
    std::ofstream(files.back()) << to_csv(schedule);
    command += concat(" '", files.back(), "'");
    ranks_of[file] = schedule.rank_count();
  };
  const auto filled = [](int ranks, int m) {
    const Schedule fill = make_schedule("1f1b", ranks, m, P2Policy::kFill);
    return lower(fill, simulate(fill, std::vector<StageCost>(ranks)));
  };
  add("1f1b_cooldown", make_schedule("1f1b", 2, 4, P2Policy::kCooldown));
  add("1f1b_fill", filled(2, 4));
  add("zb-v", make_schedule("zb-v", 4, 4, P2Policy::kPlaced));
  add("interleaved", make_schedule("interleaved-1f1b", 4, 4, P2Policy::kOff));
  add("interleaved_cooldown", make_schedule("interleaved-1f1b", 4, 4, P2Policy::kCooldown));
  add("1f1b_fill", filled(4, 6));
  add("zb-h1", make_schedule("zb-h1", 4, 6, P2Policy::kPlaced));
  add("interleaved", make_schedule("interleaved-1f1b", 8, 8, P2Policy::kOff, 4));
  add("interleaved_cooldown", make_schedule("interleaved-1f1b", 8, 6, P2Policy::kCooldown, 4));
  for (const char* name : {"zb-v", "v-half", "v-min", "dualpipe-v"}) {
    add(name, make_schedule(name, 8, 8, P2Policy::kPlaced));
  }
  add("1f1b_fill", filled(6, 7));
  add("zb-v", make_schedule("zb-v", 12, 12, P2Policy::kPlaced));
  add("dualpipe-v", make_schedule("dualpipe-v", 12, 12, P2Policy::kPlaced));

  int exit_code = 0;
  const std::string out = output_of("timeout 300 " + command, exit_code);
  if (exit_code == kSkipped) GTEST_SKIP() << out;
  ASSERT_EQ(exit_code, 0) << out;
  std::istringstream lines(out);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string file;
    int ranks = 0;
    double error = 1;
    if (!(words >> file >> ranks >> error) || !file.starts_with("twobp_")) continue;
    const auto expected = ranks_of.find(file);
    ASSERT_NE(expected, ranks_of.end()) << line;
    EXPECT_EQ(ranks, expected->second) << line;
    EXPECT_LE(error, kTolerance) << line;
    ranks_of.erase(expected);
  }
  EXPECT_TRUE(ranks_of.empty()) << ranks_of.size() << " files did not run, " << ranks_of.begin()->first << " is one:\n"
                                << out;
  for (const auto& file : files) std::remove(file.c_str());
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
