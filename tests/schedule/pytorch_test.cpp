// Compares the schedules of PyTorch's own generators (tests/golden/pytorch, written by make.py there) with
// our schedules of the same name.
//
// interleaved-1f1b and dualpipe-v are equal cell by cell. looped-bfs differs in its B. PyTorch runs them in
// reversed micro-batch order. Ours run in order, so that gradients are bitwise those of other schedules.
// interleaved-zb and zb-v have the same F and I. Our W waits until the rank would be idle (place_p2.h), while
// PyTorch's W has a fixed place. So our steps take no longer, and no rank holds more.
#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/schedule/support.h"
#include "twobp/schedule/csv.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/passes.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp::TWOBP_FILE {
namespace {

struct Golden {
  std::string name;
  Schedule theirs;  // without communication
  Schedule ours;    // also without communication
};

std::vector<Instruction> only(const std::vector<Instruction>& list, const std::vector<Op>& ops) {
  std::vector<Instruction> kept;
  for (const Instruction& i : list) {
    if (std::find(ops.begin(), ops.end(), i.op) != ops.end()) kept.push_back(i);
  }
  return kept;
}

std::vector<Golden> golden_of(const std::string& name) {
  std::vector<Golden> all;
  for (const auto& file : std::filesystem::directory_iterator(TWOBP_SOURCE_DIR "/tests/golden/pytorch")) {
    const std::string stem = file.path().stem().string();
    if (file.path().extension() != ".csv" || !stem.starts_with(name + '_')) continue;
    const Schedule theirs = read_csv(file.path().string());
    all.push_back(
        {stem, theirs, named_schedule(name).generate(theirs.stages, theirs.rank_count(), theirs.micro_batches, 1)});
  }
  return all;
}

void expect_same(const std::string& name, size_t files) {
  const auto all = golden_of(name);
  EXPECT_EQ(all.size(), files);
  for (const Golden& golden : all) {
    for (int rank = 0; rank < golden.theirs.rank_count(); ++rank) {
      EXPECT_EQ(text_of(golden.ours.ranks[rank]), text_of(golden.theirs.ranks[rank])) << golden.name;
    }
  }
}

TEST(PyTorch, InterleavedIsEqual) {
  expect_same("interleaved-1f1b", 9);
}

TEST(PyTorch, DualPipeVIsEqual) {
  expect_same("dualpipe-v", 5);
}

TEST(PyTorch, LoopedBfsHasItsBackwardInOrder) {
  const auto all = golden_of("looped-bfs");
  EXPECT_EQ(all.size(), 4u);
  for (const Golden& golden : all) {
    EXPECT_TRUE(golden.theirs.allow_reorder) << golden.name;
    EXPECT_FALSE(golden.ours.allow_reorder) << golden.name;
    for (int rank = 0; rank < golden.theirs.rank_count(); ++rank) {
      auto mirrored = golden.theirs.ranks[rank];
      for (Instruction& i : mirrored) {
        if (i.op == Op::kBackward) i.micro_batch = golden.theirs.micro_batches - 1 - i.micro_batch;
      }
      EXPECT_EQ(text_of(golden.ours.ranks[rank]), text_of(mirrored)) << golden.name;
    }
  }
}

int peak_in_flight(const Simulation& simulation) {
  int peak = 0;
  for (const auto& rank : simulation.ranks) peak = std::max(peak, rank.peak_in_flight);
  return peak;
}

void expect_later_p2(const std::string& name, size_t files) {
  const auto all = golden_of(name);
  EXPECT_EQ(all.size(), files);
  for (const Golden& golden : all) {
    for (int rank = 0; rank < golden.theirs.rank_count(); ++rank) {
      const std::vector<Op> ops = {Op::kForward, Op::kBackwardP1};
      EXPECT_EQ(text_of(only(golden.ours.ranks[rank], ops)), text_of(only(golden.theirs.ranks[rank], ops)))
          << golden.name;
    }
    const std::vector<StageCost> costs(golden.theirs.stages);
    const auto run = [&](const Schedule& schedule) {
      return simulate(add_communication(apply_p2_policy(schedule, P2Policy::kPlaced)), costs);
    };
    const Simulation ours = run(golden.ours);
    const Simulation theirs = run(golden.theirs);
    EXPECT_LE(ours.step_seconds, theirs.step_seconds) << golden.name;
    EXPECT_LE(peak_in_flight(ours), peak_in_flight(theirs)) << golden.name;
  }
}

TEST(PyTorch, InterleavedZeroBubbleHasItsP2Later) {
  expect_later_p2("interleaved-zb", 5);
}

TEST(PyTorch, ZbvHasItsP2Later) {
  expect_later_p2("zb-v", 8);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
