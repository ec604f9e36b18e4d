// Tests pipeline.schedule "auto". The search finds a schedule for the measured times at the start.
#include "twobp/plan/auto_schedule/auto_schedule.h"

#include <tuple>

#include <gtest/gtest.h>

#include "tests/schedule/support.h"
#include "tests/train/helpers.h"
#include "tests/train/training.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/profile/profile.h"
#include "twobp/plan/memory/stage_bytes.h"
#include "twobp/train/build_model.h"
#include "twobp/train/gradients.h"
#include "twobp/train/variant.h"

namespace twobp::TWOBP_FILE {
namespace {

Config config_of(int stages, int ranks) {
  Config config = test::tiny_config();
  config.pipeline.schedule = "auto";
  config.pipeline.stages = stages;
  config.pipeline.ranks = ranks;
  config.pipeline.micro_batches = 4;
  return config;
}

TEST(AutoVariant, SaysHowGoodItIs) {
  for (const auto& [stages, ranks] : {std::pair{2, 2}, std::pair{4, 2}, std::pair{4, 1}}) {
    for (const char* cap : {"auto", "0"}) {
      Config config = config_of(stages, ranks);
      config.pipeline.memory_cap = cap;
      const std::string name = Trainer(config).variant().schedule.name();
      EXPECT_EQ(name.find("auto ("), 0U) << name;
      EXPECT_NE(name.find("above the best possible"), std::string::npos) << name;
    }
  }
}

TEST(AutoVariant, ShapeFollowsTheConfiguration) {
  const auto shape = [](int stages, int ranks) { return pipeline_shape(config_of(stages, ranks).pipeline); };
  EXPECT_EQ(shape(0, 0).rank_of_stage, (std::vector<int>{0, 1}));
  EXPECT_EQ(shape(3, 0).rank_of_stage, (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(shape(4, 2).rank_of_stage, (std::vector<int>{0, 1, 1, 0}));  // a V
  EXPECT_EQ(shape(6, 2).rank_of_stage, (std::vector<int>{0, 1, 0, 1, 0, 1}));
  expect_contains(error_of([&] { shape(5, 2); }), {"pipeline.stages", "5", "2", "multiple"});
}

// A step runs under the caps of the search, not under those of the schedule that it found.
TEST(AutoVariant, RunsUnderTheCapOfTheSearch) {
  for (const auto& [stages, ranks, name] :
       {std::tuple{2, 2, "1f1b"}, std::tuple{4, 2, "zb-v"}, std::tuple{6, 2, "looped-bfs"}}) {
    Trainer trainer(config_of(stages, ranks));
    Pipeline& pipeline = trainer.pipeline();
    const StepPlan found = make_plan(pipeline, trainer.variant(), 4);
    const StepPlan standard = pipeline.plan(name, 4, P2Policy::kOff);
    EXPECT_EQ(found.standard_peaks, standard.standard_peaks) << name;
    EXPECT_EQ(found.caps, standard.caps) << name;
    EXPECT_TRUE(trainer.variant().standard.has_value());
  }
}

Config of_large_weights(int stages, const std::string& gradients) {
  Config config = config_of(stages, 2);
  config.pipeline.gradients = gradients;
  config.pipeline.micro_batch_size = 1;
  test::llama_of(config).dim = 256;
  test::llama_of(config).hidden = 640;
  return config;
}

// With one stage on each rank, no streamed W can run before the last I has ended, and a step takes longer. In a V, the
// rank of the last stage has W for its waits.
TEST(AutoVariant, ChoosesTheScheduleWithStreamedGradients) {
  const Config config = of_large_weights(0, "auto");
  const ModelSpec model = build_model(config);
  const DataSplit data = open_data(config.data, config.model.input(), config.train.seed);
  Profile profile = measure_profile(model, profiled_batch(*data.train, 1), 0.01);
  for (auto& [kind, cost] : profile) {
    cost.forward = cost.backward_p1 = 1;
    cost.backward_p2 = cost.p2_units > 0 ? 1 : 0;
    cost.forward_rise = cost.backward_p1_rise = cost.backward_p2_rise = 0;
  }
  PipelineOptions options;
  options.stages = 2;
  options.rank_of_stage = {0, 1};
  const PipelineOptions v = with_v_for_streaming(options, model, {{}, {profile}}, 8);
  EXPECT_EQ(v.rank_of_stage, (std::vector<int>{0, 1, 1, 0}));
  for (const PipelineOptions& one : {options, v}) {
    Pipeline pipeline(model, profile, one);
    Variant variant = auto_variant(pipeline, 8, Variant{.schedule = "auto", .memory_cap = MemoryCap::none()});
    const Variant kept = variant;
    const StreamedGradients gradients = decide_gradients(config, pipeline, variant, 8);
    // On the first of two ranks, a step would take 4 % longer.
    EXPECT_EQ(gradients.stages, one.stages == 4 ? std::vector<bool>(4, true) : std::vector<bool>({false, true}))
        << to_text(gradients);
    EXPECT_EQ(variant.schedule.written(), nullptr) << "the order that was found is for kept gradients";
    EXPECT_EQ(variant.policy, P2Policy::kFill);
    Config must = config;
    must.pipeline.gradients = "streamed";
    EXPECT_EQ(decide_gradients(must, pipeline, variant, 8).stages, std::vector<bool>(one.stages, true));
    // Under a cap, they fit, or are refused.
    variant = kept;
    variant.memory_cap = MemoryCap(1000);
    const std::string refused = test::error_of([&] { decide_gradients(must, pipeline, variant, 8); });
    test::expect_contains(refused, {"pipeline.memory_cap is 1000 bytes", "streamed", "raise the cap", "\"kept\""});
    const std::string needs = "the fullest rank needs ";
    variant.memory_cap = MemoryCap(std::stoll(refused.substr(refused.find(needs) + needs.size())));
    EXPECT_EQ(decide_gradients(must, pipeline, variant, 8).stages, std::vector<bool>(one.stages, true));
    pipeline.stream_gradients(std::vector<bool>(one.stages, true));
    EXPECT_EQ(warning_of_cap(pipeline, variant, 8), "");
    pipeline.stream_gradients({});
    must.pipeline.gradients = "auto";
    variant = kept;
    variant.memory_cap = MemoryCap(1 << 20);
    EXPECT_NE(decide_gradients(must, pipeline, variant, 8).why.find("memory_cap"), std::string::npos);
  }
}

TEST(AutoVariant, TrainsWithStreamedGradients) {
  for (const int stages : {0, 2, 4}) {
    Trainer trainer(of_large_weights(stages, "streamed"));
    EXPECT_EQ(trainer.gradients().stages, std::vector<bool>(trainer.pipeline().stages(), true));
    EXPECT_EQ(trainer.variant().policy, P2Policy::kFill);
    EXPECT_GT(trainer.step().loss, 0);
  }
  Config capped = of_large_weights(2, "streamed");
  capped.pipeline.memory_cap = "2KiB";
  test::expect_error([&] { Trainer{capped}; }, {"with streamed gradients the fullest rank needs"});
  Config few = config_of(0, 5);  // 8 layers
  few.pipeline.gradients = "streamed";
  EXPECT_EQ(Trainer(few).pipeline().stages(), 5);
  Config clipped = of_large_weights(0, "auto");
  clipped.train.clip_norm = 1;
  EXPECT_EQ(Trainer(clipped).pipeline().stages(), 2) << "whose gradients are kept";
}

// Layers without a product for a weight gradient have no W, and no time and bytes of one are measured.
TEST(AutoVariant, TakesStagesWithoutW) {
  // Only the blocks have adapters. The head has a stage of its own.
  Config config = config_of(2, 2);
  config.model.lora = 2;
  config.model.lora_targets = {"q_proj", "v_proj"};
  config.pipeline.split = {test::kLayers - 1, 1};
  const auto batches = test::random_batches(2, 4);
  Trainer trainer(config);
  const std::vector<StageCost> costs = profiled_costs(trainer.pipeline().layer_costs());
  EXPECT_GT(costs[0].backward_p2, 0);
  EXPECT_EQ(costs[1].backward_p2 + costs[1].stash_bytes, 0);
  EXPECT_GT(auto_schedule({0, 1}, 2, costs).seconds, 0);
  EXPECT_GT(auto_schedule({0, 1}, 2, {costs[1], costs[1]}).seconds, 0) << "no stage has one";
  test::train(trainer, batches, trainer.variant());
}

TEST(AutoVariant, RefusesACapThatNothingFits) {
  Config config = config_of(2, 2);
  config.pipeline.memory_cap = "16";
  expect_contains(error_of([&] { Trainer trainer(config); }), {"memory_cap", "rank 1", "needs", "at least"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
