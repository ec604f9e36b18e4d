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

// Returns schedules with one stage a rank, V-shaped and interleaved placements, under every policy.
std::vector<Schedule> valid_schedules() {
  std::vector<Schedule> schedules;
  for (P2Policy policy : kPolicies) {
    for (const auto& name : {"naive", "gpipe", "1f1b"}) {
      for (int stages : {1, 2, 3}) {
        for (int micro_batches : {1, 2, 4}) {
          schedules.push_back(make_schedule(name, stages, micro_batches, policy));
        }
      }
    }
    for (const auto& placement : {std::vector<int>{0, 1, 1, 0}, std::vector<int>{0, 1, 0, 1}}) {
      schedules.push_back(add_communication(apply_p2_policy(looped_gpipe(placement, 3), policy)));
    }
  }
  schedules.push_back(make_forward_schedule({0, 1, 2}, 3));
  schedules.push_back(after_frozen_stages(make_schedule("1f1b", 2, 5, P2Policy::kFill)));
  Random random(3);
  for (int round = 0; round < 20; ++round) {
    schedules.push_back(add_communication(random_schedule(random, 4, 3, 1 + round % 4, /*place_w=*/true)));
  }
  return schedules;
}

void expect_marked_rejection(const Schedule& schedule, const std::string& what) {
  const std::string error = rejection(schedule);
  ASSERT_NE(error, "") << what << " was accepted";
  bool left_empty = false;
  for (const auto& list : schedule.ranks) left_empty |= list.empty();
  if (!left_empty) {
    EXPECT_NE(marked_cell(error), "") << what << ": no cell marked in: " << error;
  }
}

TEST(Validate, AcceptsValidSchedules) {
  for (const auto& schedule : valid_schedules()) EXPECT_EQ(rejection(schedule), "");
}

TEST(Validate, RejectsEveryDroppedInstruction) {
  for (const auto& valid : valid_schedules()) {
    for (size_t rank = 0; rank < valid.ranks.size(); ++rank) {
      for (size_t i = 0; i < valid.ranks[rank].size(); ++i) {
        // Without its only B, the schedule is a valid evaluation.
        if (valid.stages * valid.micro_batches == 1 && valid.ranks[rank][i].op == Op::kBackward) continue;
        Schedule broken = valid;
        broken.ranks[rank].erase(broken.ranks[rank].begin() + static_cast<long>(i));
        expect_marked_rejection(broken, valid.name + " without " + to_string(valid.ranks[rank][i]));
      }
    }
  }
}

TEST(Validate, RejectsEveryDuplicatedInstruction) {
  for (const auto& valid : valid_schedules()) {
    for (size_t rank = 0; rank < valid.ranks.size(); ++rank) {
      for (size_t i = 0; i < valid.ranks[rank].size(); ++i) {
        for (size_t to : {i + 1, valid.ranks[rank].size()}) {
          Schedule broken = valid;
          const Instruction copy = broken.ranks[rank][i];
          broken.ranks[rank].insert(broken.ranks[rank].begin() + static_cast<long>(to), copy);
          expect_marked_rejection(broken, valid.name + " with two " + to_string(copy));
        }
      }
    }
  }
}

// Returns whether two instructions of a rank may not be swapped. They have the same op and stage, or the same stage and
// micro-batch.
bool ordered_pair(const Instruction& a, const Instruction& b) {
  if (a.stage != b.stage || a.count != 1 || b.count != 1) return false;
  if (a.op == b.op) return is_compute(a.op);
  const auto direction = [](Op op) { return op == Op::kForward || op == Op::kRecvForward || op == Op::kSendForward; };
  if (a.micro_batch != b.micro_batch) return false;
  if (is_compute(a.op) && is_compute(b.op)) return true;
  // They are a message and its op. W has no message.
  const bool w = a.op == Op::kBackwardP2 || b.op == Op::kBackwardP2;
  return !w && (is_compute(a.op) || is_compute(b.op)) && direction(a.op) == direction(b.op);
}

TEST(Validate, RejectsEverySwapOfAnOrderedPair) {
  size_t swaps = 0;
  for (const auto& valid : valid_schedules()) {
    for (size_t rank = 0; rank < valid.ranks.size(); ++rank) {
      const auto& list = valid.ranks[rank];
      for (size_t i = 0; i < list.size(); ++i) {
        for (size_t j = i + 1; j < list.size(); ++j) {
          if (!ordered_pair(list[i], list[j])) continue;
          Schedule broken = valid;
          std::swap(broken.ranks[rank][i], broken.ranks[rank][j]);
          expect_marked_rejection(
              broken, valid.name + " with " + to_string(list[i]) + " and " + to_string(list[j]) + " swapped");
          ++swaps;
        }
      }
    }
  }
  EXPECT_GT(swaps, 1000U);
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
