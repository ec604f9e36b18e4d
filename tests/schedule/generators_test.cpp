// The named schedules, instruction by instruction where small, and valid for every N, M and policy.
#include "twobp/schedule/generators.h"

#include <gtest/gtest.h>

#include "tests/schedule/support.h"
#include "twobp/schedule/passes.h"
#include "twobp/schedule/validate.h"

namespace twobp {
namespace {

TEST(Generators, Naive) {
  const Schedule schedule = naive(2, 2);
  EXPECT_EQ(text_of(schedule.ranks[0]), "0F0 0B0 0F1 0B1");
  EXPECT_EQ(text_of(schedule.ranks[1]), "1F0 1B0 1F1 1B1");
  EXPECT_EQ(schedule.rank_of_stage, (std::vector<int>{0, 1}));
}

TEST(Generators, GPipe) {
  EXPECT_EQ(text_of(gpipe(2, 3).ranks[1]), "1F0 1F1 1F2 1B0 1B1 1B2");
}

TEST(Generators, OneForwardOneBackward) {
  const Schedule schedule = one_forward_one_backward(3, 4);
  EXPECT_EQ(text_of(schedule.ranks[0]), "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3");
  EXPECT_EQ(text_of(schedule.ranks[1]), "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3");
  EXPECT_EQ(text_of(schedule.ranks[2]), "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3");
}

TEST(Generators, OneForwardOneBackwardWithFewerMicroBatchesThanStages) {
  const Schedule schedule = one_forward_one_backward(4, 2);
  EXPECT_EQ(text_of(schedule.ranks[0]), "0F0 0F1 0B0 0B1");
  EXPECT_EQ(text_of(schedule.ranks[2]), "2F0 2F1 2B0 2B1");
  EXPECT_EQ(text_of(schedule.ranks[3]), "3F0 3B0 3F1 3B1");
}

TEST(Generators, ForwardOnly) {
  const Schedule schedule = make_forward_schedule(3, 2);
  EXPECT_EQ(text_of(schedule.ranks[1]), "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1");
}

TEST(Generators, DefaultMicroBatches) {
  EXPECT_EQ(default_micro_batches("naive", 4), 1);
  EXPECT_EQ(default_micro_batches("gpipe", 4), 4);
  EXPECT_EQ(default_micro_batches("1f1b", 4), 4);
  EXPECT_EQ(default_micro_batches("1f1b-1", 4), 4);
  EXPECT_EQ(default_micro_batches("1f1b-2", 4), 8);
}

TEST(Generators, PresetsAreOneForwardOneBackward) {
  const Schedule preset = make_schedule("1f1b-2", 3, 6, P2Policy::kFill);
  EXPECT_EQ(preset.name, "1f1b-2");
  EXPECT_EQ(preset.ranks, make_schedule("1f1b", 3, 6, P2Policy::kFill).ranks);
}

TEST(Generators, EveryScheduleIsValid) {
  for (const auto& name : schedule_names()) {
    for (P2Policy policy : kPolicies) {
      for (int stages = 1; stages <= 6; ++stages) {
        for (int micro_batches = 1; micro_batches <= 13; ++micro_batches) {
          const Schedule schedule = make_schedule(name, stages, micro_batches, policy);
          ASSERT_NO_THROW(validate(schedule)) << name << ' ' << stages << ' ' << micro_batches;
          ASSERT_EQ(schedule.policy, policy);
          ASSERT_NO_THROW(validate(make_forward_schedule(stages, micro_batches)));
        }
      }
    }
  }
}

TEST(Generators, RandomSizesAreValid) {
  Random random(1);
  for (int round = 0; round < 40; ++round) {
    const int stages = random_int(random, 1, 64);
    const int micro_batches = random_int(random, 1, 256);
    const auto names = schedule_names();
    const auto& name = names[random_int(random, 0, static_cast<int>(names.size()) - 1)];
    const P2Policy policy = kPolicies[random_int(random, 0, 3)];
    ASSERT_NO_THROW(make_schedule(name, stages, micro_batches, policy))
        << name << ' ' << stages << ' ' << micro_batches;
  }
}

TEST(Generators, RandomOrdersOnRandomPlacementsAreValid) {
  Random random(2);
  for (int round = 0; round < 200; ++round) {
    const int ranks = random_int(random, 1, 4);
    const Schedule schedule =
        random_schedule(random, random_int(random, 1, 7), random_int(random, 1, 6), ranks,
                        /*place_w=*/round % 2 == 0);
    for (P2Policy policy : kPolicies) {
      const std::string error =
          error_of([&] { validate(add_communication(apply_p2_policy(schedule, policy))); });
      // A schedule with its own W and B may not keep the order of W once the B are split.
      if (round % 2 == 1 || policy == P2Policy::kOff) {
        ASSERT_EQ(error, "");
      }
    }
  }
}

TEST(Generators, UnknownNameNamesTheNearest) {
  const std::string error = error_of([] { make_schedule("1f1b2", 2, 2, P2Policy::kOff); });
  EXPECT_NE(error.find("'1f1b2'"), std::string::npos) << error;
  EXPECT_NE(error.find("did you mean '1f1b"), std::string::npos) << error;
  EXPECT_NE(error_of([] { default_micro_batches("g-pipe", 2); }).find("did you mean 'gpipe'"),
            std::string::npos);
}

TEST(Generators, RejectsNoStagesAndNoMicroBatches) {
  for (const auto& name : schedule_names()) {
    EXPECT_THROW(make_schedule(name, 0, 1, P2Policy::kOff), Error);
    EXPECT_THROW(make_schedule(name, 1, 0, P2Policy::kOff), Error);
    EXPECT_THROW(default_micro_batches(name, 0), Error);
  }
  EXPECT_THROW(make_forward_schedule(-1, 1), Error);
}

}  // namespace
}  // namespace twobp
