// Tests the named schedules. Small ones are compared instruction by instruction. All are valid for every N, M and
// policy.
#include "twobp/schedule/generators/generators.h"

#include <algorithm>

#include <gtest/gtest.h>

#include "tests/schedule/named.h"
#include "tests/schedule/support.h"
#include "twobp/core/text.h"
#include "twobp/schedule/check/validate.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/passes.h"

namespace twobp::TWOBP_FILE {
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

TEST(Interleaved, MatchesCellByCell) {
  const Schedule schedule = interleaved_one_forward_one_backward(4, 2, 4);
  EXPECT_EQ(schedule.rank_of_stage, (std::vector<int>{0, 1, 0, 1}));
  EXPECT_EQ(text_of(schedule.ranks[0]), "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3");
  EXPECT_EQ(text_of(schedule.ranks[1]), "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3");
}

TEST(Interleaved, WithOneStageARankItIsZbH1) {
  for (int n = 1; n <= 6; ++n) {
    for (int m = 1; m <= 2 * n; ++m) {
      const Schedule one = interleaved_zero_bubble(n, n, m);
      EXPECT_EQ(one.ranks, zb_h1(n, m).ranks) << n << ' ' << m;
    }
  }
}

TEST(LoopedBfs, MatchesCellByCell) {
  const Schedule schedule = looped_bfs(4, 2, 2);
  EXPECT_EQ(text_of(schedule.ranks[0]), "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1");
  EXPECT_EQ(text_of(schedule.ranks[1]), "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1");
}

TEST(Eager, RunsAheadTwiceAsFar) {
  const Schedule schedule = eager_one_forward_one_backward(3, 6);
  EXPECT_EQ(text_of(schedule.ranks[0]), "0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 0B2 0B3 0B4 0B5");
  EXPECT_EQ(text_of(schedule.ranks[1]), "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5");
  EXPECT_EQ(text_of(schedule.ranks[2]), "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5");
}

TEST(ZeroBubble, SmallOnesMatchCellByCell) {
  const Schedule h1 = zb_h1(2, 3);
  EXPECT_EQ(text_of(h1.ranks[0]), "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2");
  EXPECT_EQ(text_of(h1.ranks[1]), "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2");
  const Schedule v = zb_v(4, 2, 3);
  EXPECT_EQ(text_of(v.ranks[0]), "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2");
  EXPECT_EQ(text_of(v.ranks[1]), "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2");
}

TEST(ZeroBubble, AVNeedsTwoStagesARank) {
  const std::string error = error_of([] { make_schedule("zb-v", 4, 2, P2Policy::kPlaced, 4); });
  expect_contains(error, {"4 stages on 4 ranks", "two stages"});
  expect_contains(error_of([] { make_schedule("v-min", 3, 2, P2Policy::kPlaced); }), {"'v-min'", "multiple of 2"});
}

// As at the end of an epoch.
TEST(DualPipeV, WithFewMicroBatchesIsAPartOfThatOfTwoForEachRank) {
  const Schedule whole = dualpipe_v(8, 4, 8);
  for (int m = 1; m <= 8; ++m) {
    EXPECT_EQ(dualpipe_v(8, 4, m).ranks, keep_micro_batches(whole, m).ranks);
    for (const P2Policy policy : policies_of("dualpipe-v")) {
      EXPECT_NO_THROW(make_schedule("dualpipe-v", 8, m, policy));  // validates
    }
  }
}

TEST(Generators, ForwardOnly) {
  const Schedule schedule = make_forward_schedule({0, 1, 2}, 2);
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

TEST(Placement, HasANameAndPlacesStages) {
  EXPECT_EQ(placement_name(Placement::kLinear), "linear");
  EXPECT_EQ(placement_name(Placement::kLooped), "looped");
  EXPECT_EQ(placement_name(Placement::kV), "v");
  EXPECT_EQ(place_stages(Placement::kLinear, 3, 3), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(place_stages(Placement::kLooped, 6, 2), (std::vector<int>{0, 1, 0, 1, 0, 1}));
  EXPECT_EQ(place_stages(Placement::kV, 6, 3), (std::vector<int>{0, 1, 2, 2, 1, 0}));
  for (const auto& [placement, stages, ranks] : {std::tuple{Placement::kLinear, 4, 2},
                                                 {Placement::kLinear, 0, 0},
                                                 {Placement::kLooped, 5, 2},
                                                 {Placement::kV, 7, 3},
                                                 {Placement::kV, 3, 3},
                                                 {Placement::kLooped, 0, 1}})
    EXPECT_FALSE(placement_fits(placement, stages, ranks)) << placement_name(placement) << stages;
  expect_contains(error_of([] { place_stages(Placement::kLinear, 0, 1); }), {"at least 1 stage and 1 rank", "0 and 1"});
  expect_contains(error_of([] { place_stages(Placement::kLinear, 1, 0); }), {"1 and 0"});
  expect_contains(error_of([] { place_stages(Placement::kLinear, 4, 2); }), {"4 stages on 2 ranks", "one stage on"});
  expect_contains(error_of([] { place_stages(Placement::kV, 4, 1); }), {"two stages on"});
  expect_contains(error_of([] { place_stages(Placement::kLooped, 5, 2); }), {"the same number of stages on"});
}

TEST(Generators, AdmitsSaysWhatMakeScheduleTakes) {
  for (const auto& name : schedule_names()) {
    for (int stages = 1; stages <= 9; ++stages) {
      for (int ranks = 1; ranks <= 5; ++ranks) {
        for (int m = 0; m <= 9; ++m) {
          const std::string error = error_of([&] { make_schedule(name, stages, m, policies_of(name).back(), ranks); });
          EXPECT_EQ(admits(name, stages, ranks, m), error.empty())
              << name << ' ' << stages << " on " << ranks << ", M " << m << ": " << error;
        }
      }
    }
  }
  EXPECT_THROW(admits("2f2b", 4, 4, 4), Error);
}

TEST(Generators, NamedSchedulesOnAPlacement) {
  const auto on = [](const std::vector<int>& rank_of_stage, int m) {
    std::vector<std::string> names;
    for (const auto& [name, policy] : named_schedules_on(rank_of_stage, m)) {
      const int ranks = *std::max_element(rank_of_stage.begin(), rank_of_stage.end()) + 1;
      const Schedule schedule = make_schedule(name, static_cast<int>(rank_of_stage.size()), m, policy, ranks);
      EXPECT_EQ(schedule.rank_of_stage, rank_of_stage) << name;
      EXPECT_EQ(schedule.policy, policy) << name;
      if (names.empty() || names.back() != name) names.emplace_back(name);
    }
    return join(names);
  };
  EXPECT_EQ(on({0, 1, 1, 0}, 3), "zb-v, v-half, v-min, dualpipe-v");
  EXPECT_EQ(on({0, 1, 0, 1}, 1), "interleaved-1f1b, looped-bfs, interleaved-zb");
  EXPECT_EQ(on({0, 1}, 1),
            "naive, gpipe, 1f1b, 1f1b-1, 1f1b-2, eager-1f1b, interleaved-1f1b, looped-bfs, zb-h1, zb-h2, "
            "interleaved-zb");
  EXPECT_EQ(on({0, 0, 1}, 4), "");
  EXPECT_EQ(on({0, 1}, 0), "");
  // off, end, cooldown and fill of eleven schedules, placed of three
  EXPECT_EQ(named_schedules_on({0, 1}, 4).size(), 47U);
}

TEST(Generators, EveryScheduleIsValid) {
  for (const auto& name : schedule_names()) {
    for (P2Policy policy : policies_of(name)) {
      for (int ranks = 1; ranks <= 8; ++ranks) {
        for (int micro_batches = 1; micro_batches <= 24; ++micro_batches) {
          const int stages = stages_on(name, ranks);
          if (!admits(name, stages, ranks, micro_batches)) {
            const std::string error = error_of([&] { make_schedule(name, stages, micro_batches, policy); });
            expect_contains(error, {"'" + name + "'", "needs"});
            continue;
          }
          const Schedule schedule = make_schedule(name, stages, micro_batches, policy);
          ASSERT_NO_THROW(validate(schedule)) << name << ' ' << ranks << ' ' << micro_batches;
          ASSERT_EQ(schedule.stages, stages);
          ASSERT_EQ(schedule.rank_count(), ranks);
          ASSERT_EQ(schedule.micro_batches, micro_batches);
          ASSERT_FALSE(schedule.allow_reorder) << name;  // so that training gives the same bits
          ASSERT_EQ(schedule.policy, policy);
        }
      }
    }
  }
}

TEST(Generators, RandomSizesAreValid) {
  Random random(1);
  for (int round = 0; round < 200; ++round) ASSERT_NO_THROW(random_named_schedule(random, 64, 256)) << round;
}

TEST(Generators, RandomOrdersOnRandomPlacementsAreValid) {
  Random random(2);
  for (int round = 0; round < 200; ++round) {
    const int ranks = random_int(random, 1, 4);
    const Schedule schedule = random_schedule(random, random_int(random, 1, 7), random_int(random, 1, 6), ranks,
                                              /*place_w=*/round % 2 == 0);
    for (P2Policy policy : kPolicies) {
      const std::string error = error_of([&] { validate(add_communication(apply_p2_policy(schedule, policy))); });
      // If a schedule has its own W and B, splitting the B may break the order of W.
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
  EXPECT_NE(error_of([] { default_micro_batches("g-pipe", 2); }).find("did you mean 'gpipe'"), std::string::npos);
}

TEST(Generators, RejectsNoStagesAndNoMicroBatches) {
  for (const auto& name : schedule_names()) {
    EXPECT_THROW(make_schedule(name, 0, 1, P2Policy::kOff), Error);
    EXPECT_THROW(make_schedule(name, 1, 0, P2Policy::kOff), Error);
    EXPECT_THROW(default_micro_batches(name, 0), Error);
  }
  EXPECT_THROW(make_forward_schedule({}, 1), Error);
  EXPECT_THROW(make_forward_schedule({0}, 0), Error);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
