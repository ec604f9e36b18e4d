// Tests valid schedules that are broken in one place each. The validator must reject them and mark the cell.
#include "twobp/schedule/check/validate.h"

#include <algorithm>
#include <utility>

#include <gtest/gtest.h>

#include "tests/schedule/support.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/passes.h"

namespace twobp::TWOBP_FILE {
namespace {

std::string rejection(const Schedule& schedule) {
  return error_of([&] { validate(schedule); });
}

TEST(Validate, MarksTheCellAndDrawsTheGrid) {
  Schedule schedule = make_schedule("1f1b", 2, 2, P2Policy::kOff);
  std::swap(schedule.ranks[0][0], schedule.ranks[0][2]);  // 0F1 before 0F0
  const std::string error = rejection(schedule);
  EXPECT_EQ(marked_cell(error), "0F1");
  EXPECT_NE(error.find("0F1 comes where 0F0 is due"), std::string::npos) << error;
  EXPECT_NE(error.find("rank 1  1RECV_F0"), std::string::npos) << error;
}

// A stage without any instruction has none to mark. The last one of its rank is marked then.
TEST(Validate, MarksWhereAMissingStageWouldCome) {
  Schedule schedule = empty_schedule({0, 0}, 1);
  schedule.ranks[0] = {{Op::kForward, 0, 0}};
  expect_contains(rejection(schedule), {"1F0 is missing", ">0F0<"});
  // Of a stage that has instructions, the last one is marked, or the receive.
  schedule = make_schedule("gpipe", 2, 2, P2Policy::kOff);
  std::erase(schedule.ranks[0], Instruction{Op::kForward, 0, 1});
  std::erase(schedule.ranks[0], Instruction{Op::kSendForward, 0, 1});
  std::erase(schedule.ranks[0], Instruction{Op::kRecvBackward, 0, 1});
  std::erase(schedule.ranks[0], Instruction{Op::kBackward, 0, 1});
  EXPECT_EQ(marked_cell(rejection(schedule)), "0B0");
  // Without any instruction nothing is marked. A grid of more than 2000 cells is left out then.
  for (const int micro_batches : {2000, 2001}) {
    schedule = empty_schedule({0, 1}, micro_batches);
    for (int m = 0; m < micro_batches; ++m) schedule.ranks[0].push_back({Op::kForward, 0, m});
    const std::string error = rejection(schedule);
    expect_contains(error, {"1F0 is missing"});
    EXPECT_EQ(marked_cell(error), "");
    EXPECT_EQ(error.find("rank 1\n") != std::string::npos, micro_batches == 2000);
  }
}

TEST(Validate, AllowsReorderOnRequest) {
  Schedule schedule = empty_schedule({0}, 2);
  schedule.ranks[0] = {{Op::kForward, 0, 1}, {Op::kForward, 0, 0}, {Op::kBackward, 0, 0}, {Op::kBackward, 0, 1}};
  EXPECT_NE(rejection(schedule).find("allow_reorder"), std::string::npos);
  schedule.allow_reorder = true;
  EXPECT_EQ(rejection(schedule), "");
}

TEST(Validate, FindsADeadlock) {
  // Each rank waits for the other's second stage before it sends the output of its own first stage.
  Schedule schedule = looped_gpipe({0, 1, 0, 1}, 2);
  schedule = add_communication(schedule);
  // Rank 0 must receive for stage 2 before it has sent 0F0, because the receive moves to the front.
  auto& list = schedule.ranks[0];
  const auto receive = std::find(list.begin(), list.end(), Instruction{Op::kRecvForward, 2, 0});
  ASSERT_NE(receive, list.end());
  std::rotate(list.begin(), receive, receive + 1);
  const std::string error = rejection(schedule);
  EXPECT_NE(error.find("deadlock"), std::string::npos) << error;
  EXPECT_NE(error.find("rank 0 at 2RECV_F0 waits for rank 1"), std::string::npos) << error;
  EXPECT_NE(error.find("rank 1 at 1RECV_F0 waits for rank 0"), std::string::npos) << error;
  EXPECT_NE(marked_cell(error).find("RECV_F0"), std::string::npos) << error;
  EXPECT_EQ(error.find("and so on"), std::string::npos) << error;
}

// The message shows only the beginning of a long cycle.
TEST(Validate, ShortensALongCycle) {
  std::vector<int> twice;
  for (int stage = 0; stage < 20; ++stage) twice.push_back(stage % 10);
  Schedule schedule = add_communication(looped_gpipe(twice, 1));
  auto& list = schedule.ranks[0];
  const auto receive = std::find(list.begin(), list.end(), Instruction{Op::kRecvForward, 10, 0});
  std::rotate(list.begin(), receive, receive + 1);
  const std::string error = rejection(schedule);
  expect_contains(error, {"rank 0 at 10RECV_F0 waits for rank 9", "and so on around the circle"});
}

TEST(Validate, WritesACycleOfEightOut) {
  for (const int ranks : {8, 9}) {
    std::vector<int> twice;
    for (int stage = 0; stage < 2 * ranks; ++stage) twice.push_back(stage % ranks);
    Schedule schedule = add_communication(looped_gpipe(twice, 1));
    auto& list = schedule.ranks[0];
    const auto receive = std::find(list.begin(), list.end(), Instruction{Op::kRecvForward, ranks, 0});
    std::rotate(list.begin(), receive, receive + 1);
    EXPECT_EQ(rejection(schedule).find("and so on") == std::string::npos, ranks == 8);
  }
}

TEST(Validate, FindsADeadlockAcrossManyRanks) {
  // The first rank waits for the gradient before it sends the micro-batch.
  Schedule schedule = make_schedule("gpipe", 40, 80, P2Policy::kOff);
  auto& list = schedule.ranks[0];
  const auto receive = std::find(list.begin(), list.end(), Instruction{Op::kRecvBackward, 0, 0});
  std::rotate(list.begin() + 1, receive, receive + 1);  // after 0F0, before 0SEND_F0
  const std::string error = rejection(schedule);
  EXPECT_NE(error.find("deadlock"), std::string::npos);
  EXPECT_NE(marked_cell(error), "");
  EXPECT_LT(error.size(), 20000U) << "only the neighbourhood of the mark is worth showing";
}

TEST(Validate, RejectsBadPlacements) {
  Schedule schedule = make_schedule("gpipe", 2, 2, P2Policy::kOff);
  schedule.rank_of_stage = {0};
  EXPECT_NE(rejection(schedule).find("rank_of_stage"), std::string::npos);
  schedule.rank_of_stage = {0, 2};
  EXPECT_NE(rejection(schedule).find("stage 1 on rank 2"), std::string::npos);
  schedule.rank_of_stage = {1, 0};
  EXPECT_NE(rejection(schedule).find("belongs to rank 1"), std::string::npos);
}

TEST(Validate, RejectsNumbersThatDoNotExist) {
  for (const Instruction& bad :
       {Instruction{Op::kForward, 2, 0}, Instruction{Op::kForward, -1, 0}, Instruction{Op::kForward, 0, 2},
        Instruction{Op::kForward, 0, -1}, Instruction{Op::kForward, 0, 0, 0}, Instruction{Op::kForward, 0, 1, 2},
        Instruction{Op::kSendBackward, 0, 0}, Instruction{Op::kRecvForward, 0, 0}}) {
    Schedule schedule = make_schedule("gpipe", 2, 2, P2Policy::kOff);
    schedule.ranks[0].push_back(bad);
    EXPECT_EQ(marked_cell(rejection(schedule)), to_string(bad));
  }
}

TEST(Validate, RejectsMessagesWithinARank) {
  Schedule schedule = looped_gpipe({0, 0}, 1);
  schedule.ranks[0].insert(schedule.ranks[0].begin() + 1, {Op::kSendForward, 0, 0});
  EXPECT_NE(rejection(schedule).find("same rank"), std::string::npos);
}

TEST(Validate, RejectsWAfterBAndBAfterI) {
  Schedule schedule = empty_schedule({0}, 1);
  schedule.ranks[0] = {{Op::kForward, 0, 0}, {Op::kBackward, 0, 0}, {Op::kBackwardP2, 0, 0}};
  EXPECT_EQ(marked_cell(rejection(schedule)), "0W0");
  schedule.ranks[0] = {{Op::kForward, 0, 0}, {Op::kBackwardP1, 0, 0}, {Op::kBackward, 0, 0}};
  EXPECT_EQ(marked_cell(rejection(schedule)), "0B0");
}

TEST(Validate, RejectsABackwardOfAFrozenStage) {
  Schedule schedule = after_frozen_stages(make_schedule("1f1b", 2, 2, P2Policy::kOff));
  schedule.ranks[1].push_back({Op::kBackward, 1, 0});
  EXPECT_NE(rejection(schedule).find("1B0: stage 1 is frozen, so it has F alone"), std::string::npos);
  schedule.ranks[1].back() = {Op::kRecvBackward, 1, 0};
  EXPECT_NE(rejection(schedule).find("1RECV_B0: stage 1 is frozen, so it needs no gradient"), std::string::npos);
  schedule.ranks[1].pop_back();
  schedule.ranks[0].push_back({Op::kSendBackward, 2, 0});
  EXPECT_NE(rejection(schedule).find("2SEND_B0: stage 1 is frozen, so it needs no gradient"), std::string::npos);
  schedule.ranks[0].pop_back();
  EXPECT_EQ(rejection(schedule), "");
  schedule.frozen = 1;
  EXPECT_NE(rejection(schedule).find("has no I or B"), std::string::npos);
}

TEST(Validate, RejectsEmptySchedules) {
  EXPECT_NE(rejection(empty_schedule({0}, 1)), "");
  EXPECT_NE(rejection(Schedule{}), "");
  Schedule schedule = empty_schedule({0}, 1);
  schedule.micro_batches = 0;
  EXPECT_NE(rejection(schedule), "");
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
