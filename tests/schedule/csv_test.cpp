// Tests the text form: writing it, reading it, and the round trip of all named schedules.
#include "twobp/schedule/csv.h"

#include <filesystem>
#include <fstream>
#include <sstream>

#include <gtest/gtest.h>

#include "tests/schedule/support.h"
#include "twobp/core/text.h"
#include "twobp/schedule/check/validate.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/passes.h"
#include "twobp/schedule/schedule_source.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp::TWOBP_FILE {
namespace {

Schedule placed_1f1b() {
  return make_schedule("1f1b", 2, 2, P2Policy::kCooldown);
}

std::string with_rows(const std::vector<std::string>& rows, const std::string& end = "\n") {
  return join(rows, end) + end;
}

void expect_same_lists(const Schedule& expected, const Schedule& actual) {
  ASSERT_EQ(actual.rank_count(), expected.rank_count());
  for (int rank = 0; rank < expected.rank_count(); ++rank) {
    EXPECT_EQ(text_of(actual.ranks[rank]), text_of(expected.ranks[rank])) << "rank " << rank;
  }
  EXPECT_EQ(actual.rank_of_stage, expected.rank_of_stage);
  EXPECT_EQ(actual.stages, expected.stages);
  EXPECT_EQ(actual.micro_batches, expected.micro_batches);
  EXPECT_EQ(actual.policy, expected.policy);
}

// This is computed by hand. Rank 0 warms up with 0F1, and cooldown places W after the I of the last
// micro-batches.
TEST(Csv, WritesTheComputeForm) {
  EXPECT_EQ(to_csv(placed_1f1b()), "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n");
}

TEST(Csv, SplitsRangesIntoMicroBatches) {
  EXPECT_EQ(to_csv(make_schedule("gpipe", 1, 3, P2Policy::kEnd)), "0F0,0F1,0F2,0I0,0I1,0I2,0W0,0W1,0W2\n");
}

TEST(Csv, WritesForwardOnly) {
  const Schedule schedule = make_forward_schedule({0, 1}, 2);
  EXPECT_EQ(to_csv(schedule), "0F0,0F1\n1F0,1F1\n");
  expect_same_lists(lower(schedule), from_csv(to_csv(schedule), "forward"));
}

TEST(Csv, ReadsTheStylesOfPythonAndSpreadsheets) {
  const Schedule expected = lower(placed_1f1b());
  const std::vector<std::string> rows = {"0F0,0F1,,0I0,0W0,0I1,0W1", ",1F0,1I0,1F1,1I1,1W0,1W1,,"};
  for (const std::string& text :
       {with_rows(rows), with_rows(rows, "\r\n"), with_rows(rows, "\r"), "\xEF\xBB\xBF" + with_rows(rows),
        rows[0] + "\n" + rows[1], with_rows(rows) + "\n\n\r\n", with_rows(rows) + ",,,\n",
        with_rows({R"("0F0","0F1" , "0I0",0W0,0I1,0W1)", "1F0,  1I0\t,1F1,1I1,1W0,1W1 "})}) {
    expect_same_lists(expected, from_csv(text, "text"));
  }
}

TEST(Csv, ReadsOverlappedCellsInTheirOrder) {
  const Schedule schedule =
      from_csv("0F0,0F1,(0B0;0F2)OVERLAP_F_B,0B1,0B2\n1F0,( 1B0 ; 1F1 )OVERLAP_F_B,1B1,1F2,1B2\n", "overlap");
  EXPECT_EQ(text_of(schedule.ranks[0]), "0F0 0F1 0B0 0F2 0B1 0B2");
  EXPECT_EQ(text_of(schedule.ranks[1]), "1F0 1B0 1F1 1B1 1F2 1B2");
}

TEST(Csv, SkipsTheCellsOfFsdpAndMessages) {
  const Schedule schedule = from_csv(
      "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0\n", "fsdp");
  EXPECT_EQ(text_of(schedule.ranks[0]), "0F0 0B0");
  EXPECT_EQ(text_of(schedule.ranks[1]), "1F0 1B0");
}

TEST(Csv, DetectsReorderedMicroBatches) {
  EXPECT_FALSE(from_csv("0F0,0F1,0I0,0I1,0W0,0W1\n", "order").allow_reorder);
  EXPECT_TRUE(from_csv("0F1,0F0,0I0,0I1,0W0,0W1\n", "order").allow_reorder);
  EXPECT_TRUE(from_csv("0F0,0F1,0I1,0I0,0W0,0W1\n", "order").allow_reorder);
  EXPECT_TRUE(from_csv("0F0,0F1,0I0,0B1,0W0\n", "order").allow_reorder);  // B1 includes W1
}

// The test takes random N, stages a rank and M, every policy. Reading gives the lowered
// schedule. It takes as long and holds as much as the original.
TEST(Csv, NamedSchedulesRoundTrip) {
  Random random(1);
  int there_and_back = 0;
  for (const NamedSchedule& named : named_schedules()) {
    for (int i = 0; i < 12; ++i) {
      const int ranks = random_int(random, 1, 6);
      const int stages = ranks * usual_stages_per_rank(named.placement);
      const int micro_batches = random_int(random, 1, 20);
      if (!admits(named.name, stages, ranks, micro_batches)) continue;
      for (const P2Policy policy : policies_of(named.name)) {
        if (policy == P2Policy::kFill) continue;  // the place of its W is known only when it runs
        const Schedule schedule = make_schedule(named.name, stages, micro_batches, policy, ranks);
        const Schedule lowered = lower(schedule);
        SCOPED_TRACE(
            concat(named.name, ", ", stages, " stages, ", micro_batches, " micro-batches, p2 ", policy_name(policy)));
        const Schedule read = from_csv(to_csv(schedule), "there and back");
        expect_same_lists(lowered, read);
        EXPECT_TRUE(schedule.allow_reorder || !read.allow_reorder);
        const std::vector<StageCost> costs(stages);
        const Simulation before = simulate(schedule, costs);
        const Simulation after = simulate(add_communication(read), costs);
        EXPECT_DOUBLE_EQ(before.step_seconds, after.step_seconds);
        for (int rank = 0; rank < ranks; ++rank) {
          EXPECT_DOUBLE_EQ(before.ranks[rank].peak_bytes, after.ranks[rank].peak_bytes);
        }
        ++there_and_back;
      }
    }
  }
  EXPECT_GT(there_and_back, 100);
}

// Random placements mix B, I and W. They cover more than the named schedules.
TEST(Csv, RandomSchedulesRoundTrip) {
  Random random(2);
  for (int i = 0; i < 300; ++i) {
    const int stages = random_int(random, 1, 8);
    Schedule schedule = random_schedule(random, stages, random_int(random, 1, 8), random_int(random, 1, stages), true);
    bool rank_is_empty = false;
    for (const auto& list : schedule.ranks) rank_is_empty |= list.empty();
    if (rank_is_empty) continue;
    schedule.policy = P2Policy::kPlaced;
    const Schedule lowered = lower(schedule);
    expect_same_lists(lowered, from_csv(to_csv(schedule), "random"));
  }
}

TEST(Csv, RefusesWhatTheFormCannotHold) {
  expect_contains(error_of([] { to_csv(make_schedule("1f1b", 2, 2, P2Policy::kFill)); }),
                  {"'1f1b' has p2 fill", "simulated or a recorded order"});
  Schedule idle_rank = make_schedule("gpipe", 2, 2, P2Policy::kOff);
  idle_rank.ranks.emplace_back();
  expect_contains(error_of([&] { to_csv(idle_rank); }), {"rank 2 runs nothing"});
}

TEST(Csv, ReadsManyCells) {
  const Schedule schedule = make_schedule("1f1b", 64, 2048, P2Policy::kCooldown);
  const Schedule lowered = lower(schedule);
  expect_same_lists(lowered, from_csv(to_csv(schedule), "large"));
}

TEST(Csv, ReadsAndWritesFiles) {
  const std::string path = ::testing::TempDir() + "twobp_csv_test.csv";
  std::ofstream(path) << to_csv(placed_1f1b());
  expect_same_lists(lower(placed_1f1b()), read_csv(path));
  std::remove(path.c_str());
  expect_contains(error_of([&] { read_csv(path); }), {path, "No such file"});
  expect_contains(error_of([] { read_csv(::testing::TempDir()); }), {::testing::TempDir(), "folder"});
}

TEST(ScheduleSource, TakesNamesAndFiles) {
  const ScheduleSource named("1f1b");
  EXPECT_EQ(named.written(), nullptr);
  EXPECT_EQ(named.rank_of_stage(0, 0), (std::vector<int>{0, 1}));
  EXPECT_EQ(named.rank_of_stage(3, 0), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(named.default_micro_batches(3, 3), 3);
  EXPECT_EQ(named.default_policy(), P2Policy::kFill);

  const std::string path = ::testing::TempDir() + "twobp_source_test.csv";
  std::ofstream(path) << "0F0,0F1,0I0,0I1,1F0,1I0,1F1,1I1,1W1,1W0\n";  // 1F0 must come before 0I0
  expect_contains(error_of([&] { ScheduleSource source(path); }), {path, "row 1 (rank 0), column 3", "\"0I0\""});
  std::ofstream(path) << "0F0,0I0,0F1,0I1,0W0,0W1\n";
  const ScheduleSource file(path);
  std::remove(path.c_str());  // the file is read once
  EXPECT_EQ(file.name(), path);
  EXPECT_EQ(file.rank_of_stage(0, 0), std::vector<int>{0});
  EXPECT_EQ(file.rank_of_stage(1, 1), std::vector<int>{0});
  EXPECT_EQ(file.default_micro_batches(0, 0), 2);
  EXPECT_EQ(file.default_policy(), P2Policy::kPlaced);
  EXPECT_EQ(text_of(file.make(1, 1, 2, P2Policy::kPlaced).ranks[0]), "0F0 0I0 0F1 0I1 0W0 0W1");
  EXPECT_EQ(text_of(file.make(1, 1, 2, P2Policy::kOff).ranks[0]), "0F0 0B0 0F1 0B1");
  EXPECT_EQ(text_of(file.make(1, 1, 2, P2Policy::kEnd).ranks[0]), "0F0 0I0 0F1 0I1 0W0-1");
  EXPECT_EQ(text_of(file.make(1, 1, 1, P2Policy::kPlaced).ranks[0]), "0F0 0I0 0W0");
  expect_contains(error_of([&] { file.make(1, 1, 3, P2Policy::kPlaced); }), {path, "2 micro-batches, not of 3"});
  expect_contains(error_of([&] { file.rank_of_stage(2, 0); }), {path, "1 stages, not of 2"});
  expect_contains(error_of([&] { file.rank_of_stage(0, 2); }), {path, "1 ranks, not of 2"});

  const ScheduleSource whole(from_csv("0F0,0B0\n", "whole"));
  EXPECT_EQ(whole.default_policy(), P2Policy::kOff);
  expect_contains(error_of([&] { whole.make(1, 1, 1, P2Policy::kPlaced); }), {"'whole' places no W"});
}

// The test reads files of PyTorch's generators, for every policy and every number of micro-batches that the
// rest of an epoch may have. make() validates.
TEST(ScheduleSource, TakesPytorchsFilesUnderEveryPolicy) {
  int files = 0;
  for (const auto& file : std::filesystem::directory_iterator(TWOBP_SOURCE_DIR "/tests/golden/pytorch")) {
    if (!ScheduleSource::is_file(file.path().string())) continue;
    ++files;
    const ScheduleSource source(file.path().string());
    const Schedule& written = *source.written();
    std::vector<P2Policy> policies = kPolicies;
    if (source.default_policy() == P2Policy::kPlaced) policies.push_back(P2Policy::kPlaced);
    for (const P2Policy policy : policies) {
      for (int m = 1; m <= written.micro_batches; ++m) {
        const Schedule schedule = source.make(written.stages, written.rank_count(), m, policy);
        EXPECT_EQ(schedule.micro_batches, m);
        EXPECT_EQ(schedule.policy, policy);
      }
    }
  }
  EXPECT_GE(files, 20);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
