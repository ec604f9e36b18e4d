// Tests every named schedule, and others, with an error in every possible place: a cell is dropped or doubled, or two
// cells of a rank are swapped. The validator must reject it. For a dropped or doubled cell, the message names the cell,
// or an op that needs it. The schedule may stay valid, for example if two ops commute. Then a naive player of the lists
// must agree.
#include <algorithm>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "tests/schedule/player.h"
#include "tests/schedule/support.h"
#include "twobp/schedule/check/validate.h"
#include "twobp/schedule/check/walk.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/passes.h"

namespace twobp::TWOBP_FILE {
namespace {

std::string rejection(const Schedule& schedule) {
  return error_of([&] { validate(schedule); });
}

// A message may name the cell itself, the other side of a message, the F of a missing I, or the I of a W.
std::vector<std::string> names_of(const Instruction& cell) {
  std::vector<Op> ops = {cell.op};
  if (cell.op == Op::kBackward) ops = {cell.op, Op::kBackwardP1, Op::kForward};
  if (cell.op == Op::kBackwardP1) ops = {cell.op, Op::kForward};
  if (cell.op == Op::kBackwardP2) ops = {cell.op, Op::kBackwardP1};
  std::vector<std::string> names;
  for (int m = cell.micro_batch; m < cell.micro_batch + cell.count; ++m) {
    for (const Op op : ops) names.push_back(to_string({op, cell.stage, m}));
    if (is_compute(cell.op)) continue;
    const Instruction other = other_side({cell.op, cell.stage, m});
    names.push_back(to_string(other));
  }
  return names;
}

// Schedules without a name: a V, a loop, an evaluation, one with frozen stages, and random ones with W in any place.
std::vector<Schedule> other_schedules() {
  std::vector<Schedule> schedules = {make_forward_schedule({0, 1, 2}, 3),
                                     after_frozen_stages(make_schedule("1f1b", 2, 5, P2Policy::kFill))};
  for (const P2Policy policy : kPolicies) {
    for (const auto& placement : {std::vector<int>{0, 1, 1, 0}, std::vector<int>{0, 1, 0, 1}})
      schedules.push_back(add_communication(apply_p2_policy(looped_gpipe(placement, 3), policy)));
  }
  Random random(3);
  for (int round = 0; round < 20; ++round)
    schedules.push_back(add_communication(random_schedule(random, 4, 3, 1 + round % 4, /*place_w=*/true)));
  return schedules;
}

const std::string kOthers = "others";

class Mutations : public testing::TestWithParam<std::string> {
 protected:
  // Each schedule is made under each policy that it admits, at the two smallest sizes that matter.
  static std::vector<Schedule> schedules() {
    if (GetParam() == kOthers) return other_schedules();
    const NamedSchedule& named = named_schedule(GetParam());
    std::vector<Schedule> schedules;
    for (const auto& [ranks, micro_batches] : {std::pair{2, 4}, std::pair{3, 6}}) {
      for (const P2Policy policy : policies_of(GetParam())) {
        schedules.push_back(
            make_schedule(GetParam(), ranks * usual_stages_per_rank(named.placement), micro_batches, policy, ranks));
      }
    }
    return schedules;
  }

  // The message contains one of `names`.
  void judge(const Schedule& schedule, const std::string& what, const std::vector<std::string>& names = {}) {
    const std::string error = rejection(schedule);
    const bool plays = Player(schedule).plays_to_the_end();
    ASSERT_EQ(error.empty(), plays) << schedule.name << ' ' << policy_name(schedule.policy) << ' ' << what
                                    << (plays ? " still plays, but: " + error : " does not play, but passes");
    if (!error.empty()) {
      EXPECT_NE(marked_cell(error), "") << what << ": " << error;
      const std::string words = error.substr(0, error.find('\n'));
      EXPECT_TRUE(names.empty() ||
                  std::any_of(names.begin(), names.end(),
                              [&](const std::string& name) { return words.find(name) != std::string::npos; }))
          << what << ": " << words;
    }
    ++(plays ? still_valid_ : rejected_);
  }

  int still_valid_ = 0;
  int rejected_ = 0;
};

TEST_P(Mutations, ADroppedCellIsRejected) {
  for (const Schedule& valid : schedules()) {
    ASSERT_EQ(rejection(valid), "");
    ASSERT_TRUE(Player(valid).plays_to_the_end());
    for (size_t rank = 0; rank < valid.ranks.size(); ++rank) {
      for (size_t i = 0; i < valid.ranks[rank].size(); ++i) {
        Schedule broken = valid;
        broken.ranks[rank].erase(broken.ranks[rank].begin() + static_cast<long>(i));
        const Instruction& gone = valid.ranks[rank][i];
        ASSERT_NO_FATAL_FAILURE(judge(broken, "without " + to_string(gone), names_of(gone)));
      }
    }
  }
  EXPECT_EQ(still_valid_, 0);
  EXPECT_GT(rejected_, 100);
}

TEST_P(Mutations, ADoubledCellIsRejected) {
  Random random(7);
  for (const Schedule& valid : schedules()) {
    for (size_t rank = 0; rank < valid.ranks.size(); ++rank) {
      const int size = static_cast<int>(valid.ranks[rank].size());
      for (int i = 0; i < size; ++i) {
        Schedule broken = valid;
        const Instruction copy = broken.ranks[rank][i];
        const int to = random_int(random, 0, size);
        broken.ranks[rank].insert(broken.ranks[rank].begin() + to, copy);
        ASSERT_NO_FATAL_FAILURE(judge(broken, "with a second " + to_string(copy), names_of(copy)));
      }
    }
  }
  EXPECT_EQ(still_valid_, 0);
}

TEST_P(Mutations, SwappedCellsAreRejectedOrStillValid) {
  Random random(8);
  for (const Schedule& valid : schedules()) {
    for (size_t rank = 0; rank < valid.ranks.size(); ++rank) {
      const int size = static_cast<int>(valid.ranks[rank].size());
      for (int i = 0; i + 1 < size; ++i) {
        for (const int j : {i + 1, random_int(random, i + 1, size - 1)}) {
          Schedule broken = valid;
          std::swap(broken.ranks[rank][i], broken.ranks[rank][j]);
          ASSERT_NO_FATAL_FAILURE(judge(broken, "with " + to_string(valid.ranks[rank][i]) + " and " +
                                                    to_string(valid.ranks[rank][j]) + " swapped"));
        }
      }
    }
  }
  EXPECT_GT(rejected_, 100);
  EXPECT_GT(still_valid_, 0);  // for example, a send and the next receive commute
}

INSTANTIATE_TEST_SUITE_P(Named, Mutations, testing::ValuesIn(schedule_names()),
                         [](const testing::TestParamInfo<std::string>& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });
INSTANTIATE_TEST_SUITE_P(Unnamed, Mutations, testing::Values(kOthers));

}  // namespace
}  // namespace twobp::TWOBP_FILE
