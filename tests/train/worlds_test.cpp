// Tests runs of several processes, which are threads here. One process per rank gives the bits of a run in one process,
// and so do replicas. Measurements, decisions and failures of one process apply to all.
#include "tests/train/worlds.h"

#include <limits>

#include <gtest/gtest.h>

#include "tests/model_options.h"
#include "tests/train/helpers.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/stage.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_error;
using test::expect_same_run;
using test::run_alone;
using test::run_in;
using test::RunOutcome;

constexpr int kSteps = 4;
constexpr double kNoSpin = 0;  // there are more ranks than cores

std::vector<World> a_process_a_rank(const Config& config, int ranks) {
  return make_in_process_ranks(config.pipeline.data_parallel, ranks, kNoSpin);
}

struct Case {
  const char* name;
  Config config;
  int ranks;
};

class Worlds : public ::testing::TestWithParam<Case> {};

TEST_P(Worlds, AProcessARankGivesTheBitsOfOneProcess) {
  const Case& c = GetParam();
  const RunOutcome expected = run_alone(c.config, kSteps);
  const RunOutcome actual = run_in(a_process_a_rank(c.config, c.ranks), c.config, kSteps);
  expect_same_run(expected, actual, c.name);
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](const char* name, Config config) -> Config& {
    const int ranks = config.pipeline.ranks;
    return all.emplace_back(Case{name, std::move(config), ranks}).config;
  };
  add("llama_1f1b_2", test::world_config("1f1b", 2));
  add("llama_1f1b_3", test::world_config("1f1b", 3));
  add("llama_zb_v_2", test::world_config("zb-v", 2));  // one rank has both uses of the tied weight
  add("llama_looped_2", test::world_config("looped-bfs", 2));
  add("llama_1f1b_6", test::world_config("1f1b", 6));
  add("llama_p2_off", test::world_config("1f1b", 3)).pipeline.p2 = "off";
  add("llama_no_clipping", test::world_config("1f1b", 2)).train.clip_norm = 0;
  add("llama_sgd", test::world_config("1f1b", 2)).optimizer.type = "sgd";
  add("llama_recompute", test::world_config("1f1b", 2)).pipeline.recompute = {"both"};
  {
    Config& config = add("llama_fp16_overflow", test::world_config("1f1b", 2));
    config.train.precision = "fp16";
    config.train.loss_scale = 1e9;
  }
  {
    Config& config = add("llama_frozen", test::world_config("1f1b", 3));
    config.model.freeze = {"model.embed_tokens.weight", "model.layers.0.*"};
    test::llama_of(config).tied = false;
  }
  {
    Config& config = add("bert_dropout", test::world_config("1f1b", 3));
    test::make_bert(config, test::kSequence, 0.2);
  }
  {
    Config& config = add("resnet", test::world_config("1f1b", 2));
    test::make_tiny_resnet(config);
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, Worlds, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return std::string(info.param.name); });

// ---- data parallelism

Config replicated(const std::string& schedule, int replicas, int ranks) {
  Config config = test::world_config(schedule, ranks);
  config.pipeline.data_parallel = replicas;
  return config;
}

TEST(Replicas, ProcessesGiveTheBitsOfThreads) {
  for (const char* schedule : {"1f1b", "zb-v"}) {
    Config config = replicated(schedule, 2, 2);
    config.pipeline.bucket = "3KiB";  // several pieces of the tied table
    const RunOutcome threads = run_in(make_in_process_worlds(2, 2, kNoSpin), config, kSteps);
    const RunOutcome processes = run_in(a_process_a_rank(config, 2), config, kSteps);
    expect_same_run(threads, processes, schedule);
  }
}

// The same samples run in one pipeline with the same number of micro-batches. The sums have another order, so they are
// equal up to rounding.
TEST(Replicas, TrainLikeOnePipelineOfAllMicroBatches) {
  for (const int replicas : {2, 3}) {
    const Config config = replicated("1f1b", replicas, 2);
    Config one = config;
    one.pipeline.data_parallel = 1;
    one.pipeline.micro_batches *= replicas;
    const RunOutcome expected = run_alone(one, kSteps);
    const RunOutcome actual = run_in(make_in_process_worlds(replicas, 2, kNoSpin), config, kSteps);
    for (int i = 0; i < kSteps; ++i) {
      EXPECT_NEAR(actual.losses[i], expected.losses[i], 1e-5) << i;
      EXPECT_NEAR(actual.norms[i], expected.norms[i], 1e-4 * expected.norms[i]) << i;
    }
    EXPECT_NEAR(actual.evaluations[0].loss, expected.evaluations[0].loss, 1e-5);
    for (const auto& [name, weight] : expected.weights) {
      // An update of Adam is about lr in each step, and a gradient near 0 may have either sign.
      EXPECT_LE((actual.weights.at(name) - weight).abs().mean().item<double>(), 1e-4) << name;
    }
  }
}

// Dropout depends on the number of the micro-batch over all replicas. Otherwise two replicas would draw the same.
TEST(Replicas, DrawTheirOwnDropout) {
  Config config = replicated("1f1b", 2, 1);
  test::make_bert(config, test::kSequence).dropout = 0.3;
  Config one = config;
  one.pipeline.data_parallel = 1;
  one.pipeline.micro_batches *= 2;
  const RunOutcome expected = run_alone(one, 1);
  const RunOutcome actual = run_in(make_in_process_worlds(2, 1, kNoSpin), config, 1);
  EXPECT_NEAR(actual.losses[0], expected.losses[0], 1e-5);
}

// An epoch has 10 samples in batches of 8, so the last batch has no samples for the second replica.
TEST(Replicas, TheEndOfAnEpochMayLeaveAReplicaEmpty) {
  test::TempFolder folder;
  Config config = replicated("1f1b", 2, 2);
  test::use_arrays(config, folder, 10);
  config.data.held_out = 0;
  config.pipeline.micro_batches = 2;
  const RunOutcome threads = run_in(make_in_process_worlds(2, 2, kNoSpin), config, 4);
  const RunOutcome processes = run_in(a_process_a_rank(config, 2), config, 4);
  expect_same_run(threads, processes, "10 samples");
  Config one = config;
  one.pipeline.data_parallel = 1;
  one.pipeline.micro_batches = 4;
  const RunOutcome expected = run_alone(one, 4);
  for (int i = 0; i < 4; ++i) EXPECT_NEAR(threads.losses[i], expected.losses[i], 1e-5) << i;
}

// ---- the output of the first process

TEST(Reports, TheFirstProcessReportsAllRanks) {
  struct Wants : Observer {
    bool wants_events(int64_t step) const override { return step == 2; }
    void on_step(const StepReport&) override { ++told; }
    int told = 0;
  };
  Config config = test::world_config("1f1b", 3);
  config.pipeline.split = {3, 2, 3};
  test::llama_of(config).tied = false;  // ranks of one process share tied weights
  Trainer alone(config);
  alone.step();
  const StepReport expected = alone.step().report;
  std::vector<StepReport> reports(3);
  std::vector<int> told(3);
  run_worlds(a_process_a_rank(config, 3), [&](World world) {
    const int process = world.process();
    Trainer trainer(config, std::move(world));
    const auto wants = std::make_shared<Wants>();
    trainer.add_observer(wants);
    trainer.step();
    reports[process] = trainer.step().report;
    told[process] = wants->told;
  });
  EXPECT_EQ(told, (std::vector<int>{2, 0, 0}));
  const StepReport& report = reports[0];
  ASSERT_EQ(report.ranks.size(), 3U);
  ASSERT_EQ(report.events.size(), 3U);
  ASSERT_EQ(report.stages.size(), 3U);
  for (int r = 0; r < 3; ++r) {
    SCOPED_TRACE(concat("rank ", r));
    const RankTimes& times = report.ranks[r];
    EXPECT_EQ(times.instructions, expected.ranks[r].instructions);
    EXPECT_GT(times.busy, 0);
    EXPECT_LT(times.busy, report.seconds());
    EXPECT_GE(times.begin, report.begin);
    EXPECT_LE(times.end, report.end);
    EXPECT_EQ(report.stages[r].micro_batches, config.pipeline.micro_batches);
    // The bytes of the model do not depend on where the other processes are.
    for (const MemoryCategory category :
         {MemoryCategory::kParameters, MemoryCategory::kGradients, MemoryCategory::kOptimizer}) {
      const int c = static_cast<int>(category);
      EXPECT_GT(report.rank_memory[r].now[c], 0);
      EXPECT_EQ(report.rank_memory[r].now[c], expected.rank_memory[r].now[c]);
      EXPECT_EQ(report.stage_memory[r].now[c], expected.stage_memory[r].now[c]);
    }
    // Events fill the step, in order.
    const auto& events = report.events[r];
    ASSERT_FALSE(events.empty());
    EXPECT_EQ(events.front().begin, report.begin);
    EXPECT_EQ(events.back().end, report.end);
    double forward = 0;
    bool named = false;
    for (size_t i = 0; i < events.size(); ++i) {
      EXPECT_LE(events[i].begin, events[i].end) << i;
      if (i > 0) {
        EXPECT_LE(events[i - 1].end, events[i].begin) << i;
      }
      if (events[i].kind == Event::Kind::kForward) forward += events[i].end - events[i].begin;
      named = named || (events[i].kind == Event::Kind::kBackwardP2 && !events[i].name.empty());
    }
    EXPECT_NEAR(forward, report.stages[r].forward, 1e-9);
    EXPECT_TRUE(named);
  }
  EXPECT_EQ(reports[1].stages[1].micro_batches, config.pipeline.micro_batches) << "its own";
  EXPECT_EQ(reports[1].stages[0].micro_batches, 0) << "another's";
}

TEST(Reports, AllStopWhenOneStops) {
  const Config config = test::world_config("1f1b", 3);
  std::vector<int64_t> steps(3);
  run_worlds(a_process_a_rank(config, 3), [&](World world) {
    const int process = world.process();
    Trainer trainer(config, std::move(world));
    trainer.stop_when([&] { return process == 1 && trainer.steps_done() >= 2; });
    while (!trainer.step().stop) ASSERT_LT(trainer.steps_done(), 5);
    steps[process] = trainer.steps_done();
  });
  EXPECT_EQ(steps, (std::vector<int64_t>{3, 3, 3}));
}

// The processes agree on the stop at a batch of an evaluation, and none continues alone.
TEST(Reports, AllEndAnEvaluationWhenOneStops) {
  Config config = test::world_config("1f1b", 3);
  config.data.held_out = 0.5;
  config.train.eval_batches = 0;
  std::vector<int> looks(3);
  run_worlds(a_process_a_rank(config, 3), [&](World world) {
    const int process = world.process();
    Trainer trainer(config, std::move(world));
    trainer.stop_when([&looks, process] { return ++looks[process] > 2 && process == 1; });
    EXPECT_FALSE(trainer.evaluate().has_value());
    EXPECT_TRUE(trainer.stopping());
  });
  EXPECT_EQ(looks, (std::vector<int>{3, 3, 3}));
}

TEST(Reports, SplitAndPlansAreThoseOfTheFirstProcess) {
  Config config = test::world_config("auto", 3);
  std::vector<std::vector<int>> splits(3);
  std::vector<std::string> schedules(3);
  std::vector<std::vector<int64_t>> caps(3);
  run_worlds(a_process_a_rank(config, 3), [&](World world) {
    const int process = world.process();
    Trainer trainer(config, std::move(world));
    splits[process] = trainer.pipeline().split();
    schedules[process] = trainer.variant().schedule.name();
    const StepPlan plan = make_plan(trainer.pipeline(), trainer.variant(), trainer.micro_batches());
    for (const auto& list : plan.schedule.ranks) {
      for (const Instruction& instruction : list) schedules[process] += to_string(instruction);
    }
    caps[process] = plan.caps;
    trainer.step();
  });
  for (int process = 1; process < 3; ++process) {
    EXPECT_EQ(splits[process], splits[0]);
    EXPECT_EQ(schedules[process], schedules[0]);
    EXPECT_EQ(caps[process], caps[0]);
  }
}

// ---- failures

TEST(WorldFailures, AWeightThatIsNotFiniteIsNamedOnEveryProcess) {
  const Config config = test::world_config("1f1b", 3);
  std::vector<std::string> messages(3);
  const auto run = [&](World world) {
    const int process = world.process();
    Trainer trainer(config, std::move(world));
    Pipeline& pipeline = trainer.pipeline();
    if (pipeline.is_local(1)) {
      pipeline.stage(1).parameters(0).back()->value.fill_(std::numeric_limits<float>::quiet_NaN());
    }
    try {
      trainer.step();
    } catch (const std::exception& e) {
      messages[process] = e.what();
    }
    EXPECT_THROW(trainer.step(), std::exception);
  };
  run_worlds(a_process_a_rank(config, 3), run);
  for (const std::string& message : messages) {
    EXPECT_NE(message.find("is not finite"), std::string::npos) << message;
  }
}

TEST(WorldFailures, TheFirstErrorIsReported) {
  const Config config = test::world_config("1f1b", 3);
  expect_error(
      [&] {
        run_worlds(a_process_a_rank(config, 3), [&](World world) {
          const bool fails = world.process() == 2;
          Trainer trainer(config, std::move(world));
          trainer.step();
          if (fails) fail("the disk of process 2 is full");
          while (true) trainer.step();
        });
      },
      {"the disk of process 2 is full"});
}

TEST(WorldFailures, StagesOfOtherProcessesAreRefused) {
  const Config config = test::world_config("1f1b", 2);
  run_worlds(a_process_a_rank(config, 2), [&](World world) {
    const int process = world.process();
    Trainer trainer(config, std::move(world));
    const int other = 1 - process;
    EXPECT_EQ(trainer.pipeline().stage(process).index(), process);
    EXPECT_TRUE(trainer.pipeline().is_local(process));
    EXPECT_FALSE(trainer.pipeline().has_stage(other));
    expect_error([&] { trainer.pipeline().stage(other); },
                 {concat("stage ", other), concat("not run in this process (process ", process, ")")});
    expect_error([&] { trainer.pipeline().rank(other); }, {concat("rank ", other)});
  });
}

TEST(WorldFailures, AWorldOfAnotherShapeIsRefused) {
  const Config config = test::world_config("1f1b", 3);
  expect_error(
      [&] {
        run_worlds(make_in_process_ranks(1, 2, kNoSpin), [&](World world) { Trainer(config, std::move(world)); });
      },
      {"a world of 1 x 2 ranks", "pipeline.ranks 3"});
  Config replicas = config;
  replicas.pipeline.data_parallel = 2;
  expect_error([&] { Trainer trainer(replicas); }, {"pipeline.data_parallel is 2"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
