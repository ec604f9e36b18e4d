// Ranks that begin the next step when they have ended their part of this one: the same bits, nothing looked
// at too early, every error still an error.
#include <limits>

#include <gtest/gtest.h>

#include "tests/train/helpers.h"
#include "tests/train/worlds.h"

namespace twobp {
namespace {

using test::expect_error;
using test::expect_same_run;
using test::RunOutcome;

constexpr int kSteps = 6;

Config config_of(const std::string& schedule) {
  Config config = test::tiny_config();
  config.model.tied = true;
  config.data.held_out = 7.0 / 1024;
  config.pipeline.schedule = schedule;
  config.pipeline.ranks = 2;
  config.pipeline.stages = 0;
  config.pipeline.micro_batches = 4;
  config.pipeline.timeout = 20;
  config.pipeline.run_ahead = true;
  config.train.steps = kSteps;
  return config;
}

RunOutcome run(Config config, bool ahead) {
  config.pipeline.run_ahead = ahead;
  std::vector<World> worlds = make_in_process_worlds(config.pipeline.data_parallel, config.pipeline.ranks, 0);
  return test::run_in(std::move(worlds), config, kSteps);
}

TEST(RunAhead, KeepsEveryBit) {
  const auto expect_same = [](const std::string& what, const std::string& schedule,
                              const std::function<void(Config&)>& change) {
    Config config = config_of(schedule);
    change(config);
    expect_same_run(run(config, false), run(config, true), concat(schedule, ", ", what));
  };
  for (const std::string schedule : {"1f1b", "gpipe", "zb-h1", "zb-h2", "zb-v"}) {
    expect_same("as it is", schedule, [](Config&) {});
    expect_same("clipped", schedule, [](Config& config) { config.train.clip_norm = 0.3; });
    expect_same("replicas with shards", schedule, [](Config& config) {
      config.pipeline.data_parallel = 2;
      config.optimizer.shard = true;
    });
  }
  expect_same("standard backward", "1f1b", [](Config& config) { config.pipeline.p2 = "off"; });
  expect_same("untied", "1f1b", [](Config& config) { config.model.tied = false; });
  expect_same("BatchNorm", "1f1b", [](Config& config) {
    config.model.tied = false;
    test::make_tiny_resnet(config);
  });
  expect_same("last batches of an epoch", "1f1b", [](Config& config) {
    config.data.held_out = 1 - 21.0 / 1024;  // 21 samples to train on: batches of 8, 8 and 5
  });
  expect_same("fp16", "1f1b", [](Config& config) {
    config.train.precision = "fp16";
    config.train.loss_scale = 1e9;
  });
}

TEST(RunAhead, StandsStillWhereItIsLookedAt) {
  Trainer trainer(config_of("1f1b"));
  trainer.run_ahead_until(3);
  trainer.step();
  trainer.step();  // the third is under way
  expect_error([&] { trainer.evaluate(); }, {"step 3 is under way", "until step 3"});
  expect_error([&] { trainer.position(); }, {"step 3 is under way"});
  expect_error([&] { trainer.step(test::random_batch(2, 2, 2, 1), trainer.variant()); },
               {"step 3 is under way"});
  EXPECT_EQ(trainer.step().step, 3);
  EXPECT_TRUE(trainer.evaluate().has_value());
  EXPECT_EQ(trainer.position().step, 3);
  EXPECT_EQ(trainer.position().batches, 3);
}

// A step whose norm is above train.clip_norm, after one whose norm is not.
int first_clipped(const RunOutcome& outcome, double clip_norm) {
  for (int step = 3; step <= kSteps; ++step) {  // the first that may be presumed is the second
    if (outcome.norms[step - 2] < clip_norm && outcome.norms[step - 1] > clip_norm) return step;
  }
  return 0;
}

// One rank ends its part of a step late. The other one has gone on by then, and has to take the step back,
// with what it has begun of the next one, since that step was clipped.
TEST(RunAhead, TakesStepsBackToTheBit) {
  const auto expect_same = [](const std::string& what, const std::string& schedule, int late_rank,
                              const std::function<void(Config&)>& change) {
    Config config = config_of(schedule);
    config.model.tied = false;   // or the ranks wait for each other's gradients of what is tied
    config.optimizer.lr = 1e-4;  // so that norms differ by batch, instead of falling
    change(config);
    std::vector<double> norms = run(config, false).norms;
    RunOutcome expected;
    int clipped = 0;
    for (size_t i = 0; i < norms.size() && clipped == 0; ++i) {
      config.train.clip_norm = norms[i] * 0.999;
      expected = run(config, false);
      clipped = first_clipped(expected, config.train.clip_norm);
    }
    ASSERT_GT(clipped, 0) << what << ": " << ::testing::PrintToString(norms);
    config.pipeline.post_validation = true;
    const test::Environment late("TWOBP_FAIL",
                                 concat("optimizer:step=", clipped, ":rank=", late_rank, ":seconds=0.3"));
    const RunOutcome actual = run(config, true);
    EXPECT_GT(actual.taken_back, 0) << what;
    expect_same_run(expected, actual, concat(schedule, ", ", what, ", rank ", late_rank, " late"));
  };
  for (const int late_rank : {0, 1}) {
    for (const std::string schedule : {"1f1b", "gpipe", "zb-h2", "zb-v"})
      expect_same("as it is", schedule, late_rank, [](Config&) {});
    expect_same("bf16", "1f1b", late_rank, [](Config& config) { config.train.precision = "bf16"; });
    expect_same("dropout", "1f1b", late_rank, [](Config& config) {
      config.model.type = "bert";
      config.model.kv_heads = 0;
      config.model.positions = test::kSequence;
      config.model.dropout = config.model.attention_dropout = 0.2;
    });
    expect_same("BatchNorm", "1f1b", late_rank, [](Config& config) { test::make_tiny_resnet(config); });
    expect_same("replicas", "1f1b", late_rank, [](Config& config) { config.pipeline.data_parallel = 2; });
  }
}

// Who stops a run wants to save what it has: no step is under way then.
TEST(RunAhead, StopsAfterTheStepThatIsUnderWay) {
  Trainer trainer(config_of("1f1b"));
  trainer.run_ahead_until(kSteps);
  trainer.stop_when([&] { return trainer.steps_done() >= 2; });
  std::vector<bool> stops;
  do stops.push_back(trainer.step().stop);
  while (!stops.back() && stops.size() < kSteps);
  EXPECT_EQ(stops, (std::vector<bool>{false, false, false, true}));
  EXPECT_EQ(trainer.position().step, 4);
}

// Steps follow each other without a gap or an overlap, so that their seconds add up.
TEST(RunAhead, ReportsTileTheTime) {
  Trainer trainer(config_of("1f1b"));
  const RunOutcome outcome = test::steps_of(trainer, kSteps);
  for (int i = 2; i < kSteps; ++i) {
    const StepReport& report = outcome.reports[i];
    EXPECT_EQ(report.begin, outcome.reports[i - 1].end) << "step " << i + 1;
    for (const RankTimes& times : report.ranks) {
      for (const double idle : times.idle) EXPECT_GE(idle, 0) << "step " << i + 1;
    }
  }
}

TEST(RunAhead, ANumberThatIsNotFiniteStillEndsTheRun) {
  Trainer trainer(config_of("1f1b"));
  trainer.run_ahead_until(kSteps);
  trainer.step();
  trainer.step();
  trainer.pipeline().on_ranks([&](int rank) {  // after the step that is under way
    if (rank == 1) trainer.weights().back()->value.fill_(std::numeric_limits<float>::quiet_NaN());
  });
  expect_error(
      [&] {
        for (int i = 0; i < 3; ++i) trainer.step();
      },
      {"is not finite", "step"});
  expect_error([&] { trainer.step(); }, {"failed in an earlier step"});
}

// Ranks of one process with a pipeline object each: what one books the other lets go.
TEST(RunAhead, LeavesNothingOnTheBooksOfEither) {
  const Config config = config_of("zb-v");
  run_worlds(make_in_process_ranks(1, 2, 0), [&](World world) {
    Trainer trainer(config, std::move(world));
    Pipeline& pipeline = trainer.pipeline();
    const int rank = pipeline.world().local_ranks().front();
    std::vector<int64_t> held;
    for (const int steps : {4, 16}) {
      test::steps_of(trainer, steps);  // ends with an evaluation, for which all wait
      held.push_back(pipeline.meter().held(rank));
    }
    EXPECT_EQ(held[0], held[1]) << "rank " << rank;
  });
}

TEST(RunAhead, EndsInTheMiddleOfAStep) {
  Trainer trainer(config_of("zb-v"));
  trainer.run_ahead_until(kSteps);
  trainer.step();
  trainer.step();
}

}  // namespace
}  // namespace twobp
