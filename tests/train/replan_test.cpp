// Online re-planning: the plan follows the stages' times, holds no more than the one before, and the result
// keeps every bit.
#include <algorithm>
#include <tuple>

#include <gtest/gtest.h>

#include "tests/train/training.h"
#include "twobp/pipeline/profile/simulated_costs.h"
#include "twobp/schedule/check/in_process.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/train/replanner.h"

namespace twobp {
namespace {

using test::tiny_config;

constexpr int kMicroBatches = 4;

Config config_of(const std::string& schedule, double replan) {
  Config config = tiny_config();
  config.pipeline.stages = 2;
  config.pipeline.schedule = schedule;
  config.pipeline.p2 = "off";
  config.pipeline.micro_batches = kMicroBatches;
  config.pipeline.memory_cap = "0";
  config.pipeline.replan = replan;
  return config;
}

// A step on 2 ranks in which every stage took `seconds` for each of F, I and W.
StepReport report_of(double seconds, int micro_batches = kMicroBatches, int stages = 2) {
  StepReport report;
  report.ranks.resize(2);
  report.stages.resize(stages);
  for (StageTimes& stage : report.stages) {
    stage.forward = stage.backward_p1 = stage.backward_p2 = seconds * micro_batches;
    stage.micro_batches = micro_batches;
  }
  return report;
}

Simulation simulation_of(const Pipeline& pipeline, const Variant& variant, const StepReport& report) {
  const Plan plan = make_plan(pipeline, variant, report.stages.front().micro_batches);
  return simulate(plan.schedule, measured_costs(pipeline.stage_costs(), pipeline.rank_of_stage(), report),
                  in_process_simulation(pipeline.caps(plan)));
}

// What the replanner answers when the last steps were all like this one.
std::optional<Replan> after_window(Replanner& replanner, const StepReport& report, const Variant& now) {
  std::optional<Replan> replan;
  for (int step = 0; step < Replanner::kWindow && !replan; ++step) replan = replanner.after_step(report, now);
  return replan;
}

TEST(Replan, LooksForAPlanWhenTimesDriftAndOnlyThen) {
  Config config = config_of("naive", 0);
  config.pipeline.memory_cap = "1GiB";  // room for any
  Trainer trainer(config);
  Replanner replanner(0.5, trainer.pipeline(), kMicroBatches, trainer.variant());
  // Far from what a tiny model's layers take: the first full window calls for a plan.
  for (int step = 1; step < Replanner::kWindow; ++step) {
    EXPECT_FALSE(replanner.after_step(report_of(1), trainer.variant())) << step;
  }
  const auto first = replanner.after_step(report_of(1), trainer.variant());
  ASSERT_TRUE(first);
  EXPECT_GT(first->drift, 0.5);
  EXPECT_GT(first->gain, 0.5) << "naive leaves half of the time idle";
  EXPECT_NE(first->variant.schedule.name(), "naive");
  EXPECT_NE(first->variant.policy, P2Policy::kOff);
  EXPECT_NE(to_text(*first).find("faster"), std::string::npos) << to_text(*first);
  // That is what is planned for now: less than a half more is no drift, and single slow steps are none.
  for (int step = 0; step < 3 * Replanner::kWindow; ++step) {
    EXPECT_FALSE(replanner.after_step(report_of(step % 3 == 0 ? 5 : 1.4), first->variant)) << step;
  }
  // Half the time is a drift of exactly a half, a quarter more than that; no plan is better than the best.
  const std::optional<Replan> second = after_window(replanner, report_of(0.25), first->variant);
  ASSERT_TRUE(second);
  EXPECT_LT(second->drift, -0.5);
  EXPECT_EQ(second->gain, 0);
  EXPECT_EQ(second->variant.schedule.name(), first->variant.schedule.name());
  EXPECT_NE(to_text(*second).find("no other plan"), std::string::npos) << to_text(*second);
}

TEST(Replan, TheRestOfAnEpochDoesNotCount) {
  Trainer trainer(config_of("naive", 0));
  Replanner replanner(0.5, trainer.pipeline(), kMicroBatches, trainer.variant());
  for (int step = 0; step < 3 * Replanner::kWindow; ++step) {
    EXPECT_FALSE(replanner.after_step(report_of(1, 3), trainer.variant()));
  }
}

TEST(Replan, TrainsTheSameWeights) {
  Config plain = config_of("gpipe", 0);
  Config replanned = config_of("gpipe", 1e-9);  // anything is a drift
  Trainer expected(plain);
  Trainer actual(replanned);
  int plans = 0;
  for (int step = 0; step < 3 * Replanner::kWindow; ++step) {
    const StepResult a = expected.step();
    const StepResult b = actual.step();
    EXPECT_FALSE(a.replan);
    plans += b.replan ? 1 : 0;
    ASSERT_EQ(a.loss, b.loss) << "step " << step;
  }
  EXPECT_GE(plans, 2);
  for (size_t i = 0; i < expected.weights().size(); ++i) {
    EXPECT_TRUE(test::same_bits(expected.weights()[i]->value, actual.weights()[i]->value)) << i;
  }
}

TEST(Replan, RefusesAThresholdThatIsNone) {
  Trainer trainer(config_of("gpipe", 0));
  EXPECT_THROW(Replanner(0, trainer.pipeline(), kMicroBatches, trainer.variant()), Error);
}

// gpipe with its W at the end would be faster here than 1f1b without 2BP, and hold M micro-batches for 2.
TEST(Replan, HoldsNoMoreThanThePlanTheRunBeganWith) {
  Config config = config_of("1f1b", 0);
  config.pipeline.micro_batches = 8;
  Trainer trainer(config);
  const Pipeline& pipeline = trainer.pipeline();
  const StepReport report = report_of(1, 8);
  const Simulation now = simulation_of(pipeline, trainer.variant(), report);
  const Simulation gpipe = simulation_of(pipeline, {"gpipe", P2Policy::kEnd, P2Batching::kLoop, 0}, report);
  ASSERT_LT(gpipe.step_seconds * (1 + Replanner::kLeastGain), now.step_seconds);
  ASSERT_GT(gpipe.ranks[0].peak_bytes, now.ranks[0].peak_bytes);

  Replanner replanner(1e-9, pipeline, 8, trainer.variant());
  const auto replan = after_window(replanner, report, trainer.variant());
  ASSERT_TRUE(replan);
  const Simulation chosen = simulation_of(pipeline, replan->variant, report);
  for (int r = 0; r < pipeline.ranks(); ++r) {
    EXPECT_LE(chosen.ranks[r].peak_bytes, now.ranks[r].peak_bytes) << replan->variant.schedule;
  }
}

// Plan after plan, whatever the times: the cap that the run began with stays, on each of the ranks.
TEST(Replan, KeepsTheCap) {
  for (const auto& [schedule, stages, policy] :
       {std::tuple{"1f1b", 2, "off"}, std::tuple{"zb-v", 4, "placed"}, std::tuple{"naive", 2, "fill"},
        std::tuple{"auto", 2, "fill"}}) {
    Config config = config_of(schedule, 0);
    config.pipeline.memory_cap = "auto";
    config.pipeline.stages = stages;
    config.pipeline.ranks = 2;
    config.pipeline.p2 = policy;
    Trainer trainer(config);
    const Pipeline& pipeline = trainer.pipeline();
    const auto caps = pipeline.caps(make_plan(pipeline, trainer.variant(), kMicroBatches));
    Replanner replanner(1e-9, pipeline, kMicroBatches, trainer.variant());
    Variant now = trainer.variant();
    SplitMix64 random(5);
    for (int drift = 0; drift < 20; ++drift) {
      StepReport report = report_of(1, kMicroBatches, stages);
      for (StageTimes& stage : report.stages) {
        for (double* part : {&stage.forward, &stage.backward_p1, &stage.backward_p2}) {
          *part *= 1 + static_cast<double>(bounded(random, 1000));
        }
      }
      const auto replan = after_window(replanner, report, now);
      ASSERT_TRUE(replan);
      now = replan->variant;
      EXPECT_EQ(pipeline.caps(make_plan(pipeline, now, kMicroBatches)), caps) << now.schedule;
      const Simulation began = simulation_of(pipeline, trainer.variant(), report);
      const Simulation chosen = simulation_of(pipeline, now, report);
      for (int r = 0; r < pipeline.ranks(); ++r) {
        EXPECT_LE(chosen.ranks[r].peak_bytes,
                  std::max(static_cast<double>(caps[r]), began.ranks[r].peak_bytes))
            << now.schedule << " after " << schedule << ", rank " << r;
      }
    }
  }
}

// A V, whose placement a schedule that holds two copies of the model has, too: that one cannot be run.
TEST(Replan, OnAV) {
  Config config = config_of("zb-v", 0);
  config.pipeline.stages = 4;
  config.pipeline.ranks = 2;
  config.pipeline.p2 = "placed";
  Config replanned = config;
  replanned.pipeline.replan = 1e-9;
  Trainer expected(config);
  Trainer actual(replanned);
  int plans = 0;
  for (int step = 0; step < 3 * Replanner::kWindow; ++step) {
    const StepResult a = expected.step();
    const StepResult b = actual.step();
    plans += b.replan ? 1 : 0;
    ASSERT_EQ(a.loss, b.loss) << "step " << step;
  }
  EXPECT_GE(plans, 2);
}

}  // namespace
}  // namespace twobp
