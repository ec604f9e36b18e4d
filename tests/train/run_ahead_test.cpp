// Tests ranks that begin the next step after their own part of this one. The bits are the same, no result is read too
// early, and every error is still reported.
#include <algorithm>
#include <limits>

#include <gtest/gtest.h>

#include "benchmarks/emulated.h"
#include "tests/every_way.h"
#include "tests/model_options.h"
#include "tests/train/helpers.h"
#include "tests/train/worlds.h"
#include "twobp/core/measure.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/profile/profile.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/train/variant.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_error;
using test::expect_same_run;
using test::RunOutcome;

constexpr int kSteps = 6;

// These are the seconds by which a rank is late. They grow if a busy machine kept the other rank from getting ahead in
// that time.
constexpr const char* kLate[] = {"0.1", "1", "5"};

Config config_of(const std::string& schedule) {
  Config config = test::tiny_config();
  test::llama_of(config).tied = true;
  config.data.held_out = 7.0 / 1024;
  config.pipeline.schedule = schedule;
  config.pipeline.ranks = 2;
  config.pipeline.stages = 0;
  config.pipeline.micro_batches = 4;
  config.pipeline.timeout = 20;
  config.pipeline.run_ahead = "on";
  config.train.steps = kSteps;
  return config;
}

RunOutcome run(Config config, bool ahead) {
  config.pipeline.run_ahead = ahead ? "on" : "off";
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
  expect_same("untied", "1f1b", [](Config& config) { test::llama_of(config).tied = false; });
  expect_same("BatchNorm", "1f1b", [](Config& config) {
    test::llama_of(config).tied = false;
    test::make_tiny_resnet(config);
  });
  expect_same("last batches of an epoch", "1f1b", [](Config& config) {
    config.data.held_out = 1 - 21.0 / 1024;  // 21 samples to train on: batches of 8, 8 and 5
  });
  for (const double clip_norm : {0.0, 0.3}) {
    expect_same("a replica without samples", "1f1b", [=](Config& config) {
      config.data.held_out = 1 - 17.0 / 1024;  // batches of 16 and 1
      config.pipeline.data_parallel = 2;
      config.train.clip_norm = clip_norm;
    });
  }
  for (const int ranks : {1, 2}) {  // with one rank, the loss is in the part that runs first
    for (const std::string schedule : {"1f1b", "gpipe"}) {
      expect_same(concat("fp16, ", ranks, " ranks"), schedule, [=](Config& config) {
        config.pipeline.ranks = ranks;
        config.train.precision = "fp16";
        config.train.loss_scale = 1e9;
      });
    }
  }
}

// A rank applies all of its streamed gradients before it begins the next step.
TEST(RunAhead, KeepsTheBitsOfStreamedGradients) {
  for (const std::string schedule : {"1f1b", "gpipe", "zb-h2", "zb-v"}) {
    for (const bool tied : {false, true}) {
      for (const int replicas : {1, 2}) {
        Config config = config_of(schedule);
        test::llama_of(config).tied = tied;
        config.train.clip_norm = 0;
        config.pipeline.data_parallel = replicas;
        config.optimizer.shard = replicas > 1;
        const RunOutcome kept = run(config, false);
        config.pipeline.gradients = "streamed";
        const RunOutcome streamed = run(config, true);
        expect_same_run(kept, streamed, concat(schedule, tied ? ", tied, " : ", ", replicas, " replicas"));
        EXPECT_TRUE(std::ranges::any_of(streamed.reports, &StepReport::begun_early)) << schedule;
      }
    }
  }
}

TEST(RunAhead, RefusesToReadTheStateDuringAStep) {
  Trainer trainer(config_of("1f1b"));
  trainer.run_ahead_until(3);
  trainer.step();
  trainer.step();  // the third step is running
  expect_error([&] { trainer.evaluate(); }, {"step 3 is under way", "until step 3"});
  expect_error([&] { trainer.position(); }, {"step 3 is under way"});
  expect_error([&] { trainer.step(test::random_batch(2, 2, 2, 1), trainer.variant()); }, {"step 3 is under way"});
  EXPECT_EQ(trainer.step().step, 3);
  EXPECT_TRUE(trainer.evaluate().has_value());
  EXPECT_EQ(trainer.position().step, 3);
  EXPECT_EQ(trainer.position().batches, 3);
}

// One rank ends its part of a step late. The other rank has continued by then. The step was clipped, so the other rank
// must undo the step and the part of the next step that it has begun.
TEST(RunAhead, UndoesStepsToTheBit) {
  int number = 0;  // each case runs with one late rank, and with the other one in every way
  const auto expect_same = [&](const std::string& what, const std::string& schedule, int late_rank,
                               const std::function<void(Config&)>& change) {
    if ((number++ + late_rank) % 2 == 1 && !test::every_way()) return;
    Config config = config_of(schedule);
    // Otherwise the ranks wait for each other's gradients of tied weights.
    test::llama_of(config).tied = false;
    config.optimizer.lr = 1e-4;  // so that norms differ by batch instead of falling
    change(config);
    const auto [expected, clipped] =
        test::clip_one_step(config, [&](const Config& clips) { return run(clips, false); });
    ASSERT_GT(clipped, 0) << what;
    int64_t taken_back = 0;
    for (const char* seconds : kLate) {
      const test::Environment late("TWOBP_FAIL",
                                   concat("optimizer:step=", clipped, ":rank=", late_rank, ":seconds=", seconds));
      const RunOutcome actual = run(config, true);
      expect_same_run(expected, actual, concat(schedule, ", ", what, ", rank ", late_rank, " late"));
      taken_back = actual.taken_back;
      if (taken_back > 0) break;
    }
    EXPECT_GT(taken_back, 0) << what;
  };
  for (const int late_rank : {0, 1}) {
    for (const std::string schedule : {"1f1b", "gpipe", "zb-h2", "zb-v"})
      expect_same("as it is", schedule, late_rank, [](Config&) {});
    expect_same("bf16", "1f1b", late_rank, [](Config& config) { config.train.precision = "bf16"; });
    expect_same("dropout", "1f1b", late_rank, [](Config& config) { test::make_bert(config, test::kSequence, 0.2); });
    expect_same("BatchNorm", "1f1b", late_rank, [](Config& config) { test::make_tiny_resnet(config); });
    expect_same("replicas", "1f1b", late_rank, [](Config& config) { config.pipeline.data_parallel = 2; });
    expect_same("three ranks", "1f1b", late_rank, [](Config& config) { config.pipeline.ranks = 3; });
    expect_same("recomputed", "1f1b", late_rank, [](Config& config) { config.pipeline.recompute = {"both"}; });
    expect_same("LoRA", "zb-h2", late_rank, [](Config& config) {
      config.model.lora = 2;
      config.model.lora_targets = {"q_proj", "down_proj"};
    });
    expect_same("fp16", "1f1b", late_rank, [](Config& config) {
      config.train.precision = "fp16";
      config.train.loss_scale = 64;
    });
  }
}

// The loss scale doubles after the second step, so that the gradients of a later step overflow. A rank that has
// continued undoes its step, and the next step has half the scale.
TEST(RunAhead, UndoesAStepThatOverflows) {
  Config config = config_of("1f1b");
  test::llama_of(config).tied = false;
  config.train.precision = "fp16";
  config.train.loss_scale = 1e9;
  config.pipeline.run_ahead = "off";
  double highest = 0;  // of the norms that do not overflow
  {
    Trainer trainer(config);
    StepResult result;
    do result = trainer.step();
    while (result.skipped);
    highest = result.loss_scale;
  }
  const auto run_from = [&](const Config& from) {
    Trainer trainer(from);
    trainer.go_on_from({0, 0, highest, LossScale::kGrowthSteps - 2});
    return test::steps_of(trainer, kSteps);
  };
  const RunOutcome expected = run_from(config);
  ASSERT_FALSE(expected.skipped.empty());
  const int64_t overflows = expected.skipped.front();
  ASSERT_GE(overflows, 3);
  config.pipeline.run_ahead = "on";
  expect_same_run(expected, run_from(config), "nobody is late");
  int64_t taken_back = 0;  // a rank that sees the overflow in its own gradients does not count
  for (const char* seconds : kLate) {
    for (const int late_rank : {0, 1}) {
      const test::Environment late("TWOBP_FAIL",
                                   concat("optimizer:step=", overflows, ":rank=", late_rank, ":seconds=", seconds));
      const RunOutcome actual = run_from(config);
      taken_back += actual.taken_back;
      expect_same_run(expected, actual, concat("rank ", late_rank, " late"));
    }
    if (taken_back > 0) break;
  }
  EXPECT_GT(taken_back, 0);
}

// A caller that stops a run saves its state, so no step may be running at that time.
TEST(RunAhead, StopsAfterTheRunningStep) {
  Trainer trainer(config_of("1f1b"));
  trainer.run_ahead_until(kSteps);
  trainer.stop_when([&] { return trainer.steps_done() >= 2; });
  std::vector<bool> stops;
  do stops.push_back(trainer.step().stop);
  while (!stops.back() && stops.size() < kSteps);
  EXPECT_EQ(stops, (std::vector<bool>{false, false, false, true}));
  EXPECT_EQ(trainer.position().step, 4);
}

// Steps follow each other without a gap or an overlap, so their seconds add up.
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
  trainer.pipeline().on_ranks([&](int rank) {  // after the step that is running
    if (rank == 1) trainer.weights().back()->value.fill_(std::numeric_limits<float>::quiet_NaN());
  });
  expect_error(
      [&] {
        for (int i = 0; i < 3; ++i) trainer.step();
      },
      {"is not finite", "step"});
  expect_error([&] { trainer.step(); }, {"failed in an earlier step"});
}

// The ranks are in one process, and each has a pipeline object. One rank allocates memory that the other releases.
TEST(RunAhead, CountsNoMemoryAfterwards) {
  const Config config = config_of("zb-v");
  run_worlds(make_in_process_ranks(1, 2, 0), [&](World world) {
    Trainer trainer(config, std::move(world));
    Pipeline& pipeline = trainer.pipeline();
    const int rank = pipeline.world().local_ranks().front();
    std::vector<int64_t> held;
    for (const int steps : {4, 16}) {
      test::steps_of(trainer, steps);  // the evaluation at the end waits for all ranks
      held.push_back(pipeline.meter().held(rank));
    }
    EXPECT_EQ(held[0], held[1]) << "rank " << rank;
  });
}

// Returns the decisions for layers of equal costs. The gains are those of tests/schedule/step_periods_test.cpp.
RunAhead decided(const std::string& schedule, int ranks, const std::function<void(Config&)>& change,
                 bool ties_ranks = false) {
  Config config;
  config.pipeline.data_parallel = 1;
  change(config);
  const Placement placement = named_schedule(schedule).placement;
  const int stages = ranks * usual_stages_per_rank(placement);
  EmulatedLayer layer;
  layer.activation_bytes = layer.stash_bytes = 1 << 10;
  const ModelSpec model = emulated(std::vector<EmulatedLayer>(stages, layer));
  Profile profile;
  for (const LayerSpec& spec : model.layers) {
    LayerCost& cost = profile[spec.kind];
    cost.forward = cost.backward_p1 = cost.backward_p2 = 0.5;
    cost.p2_units = 1;
  }
  PipelineOptions options;
  options.stages = stages;
  options.split.assign(stages, 1);
  options.rank_of_stage = place_stages(placement, stages, ranks);
  Pipeline pipeline(model, profile, options);
  return decide_run_ahead(config, pipeline,
                          pipeline.plan(schedule, 2 * ranks, P2Policy::kPlaced, {P2Batching::kLoop, 0}), ties_ranks);
}

TEST(RunAhead, AutoFollowsTheSimulatedGain) {
  const auto as_it_is = [](Config&) {};
  const auto clips = [](Config& config) { config.train.clip_norm = 1; };
  const RunAhead h2 = decided("zb-h2", 4, as_it_is);
  EXPECT_TRUE(h2.on);
  EXPECT_FALSE(h2.presumes);
  EXPECT_NEAR(h2.gain, 27.0 / 24, 1e-9);
  EXPECT_NE(to_text(h2).find("without waiting for each other (simulated: 1.12x"), std::string::npos);
  EXPECT_TRUE(decided("zb-v", 4, as_it_is).on);
  EXPECT_FALSE(decided("zb-h2", 4, as_it_is, /*ties_ranks=*/true).on);
  const RunAhead h1 = decided("zb-h1", 4, as_it_is);
  EXPECT_FALSE(h1.on) << h1.gain;
  const RunAhead clipped = decided("zb-h2", 4, clips);
  EXPECT_TRUE(clipped.on);
  EXPECT_TRUE(clipped.presumes);
  EXPECT_NEAR(clipped.gain, 27.0 / 24, 1e-9);
}

TEST(RunAhead, AutoIsOffWhereItIsNotSupported) {
  for (const auto& change :
       std::vector<std::function<void(Config&)>>{[](Config& config) { config.pipeline.run_ahead = "off"; },
                                                 [](Config& config) { config.pipeline.graphs = true; },
                                                 [](Config& config) {
                                                   config.train.clip_norm = 1;
                                                   config.optimizer.shard = true;
                                                   config.pipeline.data_parallel = 2;
                                                 }}) {
    EXPECT_FALSE(decided("zb-h2", 4, change).on);
  }
  const RunAhead on = decided("zb-h1", 4, [](Config& config) { config.pipeline.run_ahead = "on"; });
  EXPECT_TRUE(on.on);
  EXPECT_FALSE(decided("zb-h2", 1, [](Config& config) { config.pipeline.run_ahead = "on"; }).on);
}

// If a step is running when the trainer is destroyed, it ends or is abandoned. No rank waits for its time-out.
TEST(RunAhead, EndsInTheMiddleOfAStep) {
  Config config = config_of("zb-v");
  config.pipeline.timeout = 600;
  std::vector<double> losses;
  double begin = 0;
  {
    Trainer trainer(config);
    trainer.run_ahead_until(kSteps);
    for (int i = 0; i < 2; ++i) losses.push_back(trainer.step().loss);
    test::expect_error([&] { trainer.evaluate(); }, {"step 3 is under way"});
    begin = now_seconds();
  }
  EXPECT_LT(now_seconds() - begin, 60);
  std::vector<double> expected = run(config, false).losses;
  expected.resize(2);
  EXPECT_EQ(losses, expected);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
