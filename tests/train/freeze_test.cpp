// Tests frozen parameters and LoRA. Untrained parameters cost nothing and do not move. Trained parameters move as if
// all were trained, to the bit.
#include <gtest/gtest.h>

#include "tests/train/helpers.h"
#include "tests/train/training.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/train/build_model.h"
#include "twobp/train/weights/weight_files.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::random_batches;
using test::tiny_config;

// SGD without clipping is used, so the gradients of the frozen weights do not affect the first step of the others.
Config frozen_config(std::vector<std::string> patterns, int stages = 1) {
  Config config = tiny_config();
  config.model.freeze = std::move(patterns);
  config.optimizer.type = "sgd";
  config.pipeline.stages = stages;
  return config;
}

const std::vector<std::string> kFirstBlocks = {"model.embed_tokens.weight", "model.layers.0.*",
                                               "model.layers.1.self_attn.*"};

TEST(Frozen, OtherWeightsMoveAsIfAllWereTrained) {
  const auto batches = random_batches(1, 2);
  const Variant variant{"1f1b", P2Policy::kFill};
  Trainer all(frozen_config({}));
  Trainer some(frozen_config(kFirstBlocks));
  const auto before = test::copies_of(all.weights());
  const auto full = test::train(all, batches, variant);
  const auto partial = test::train(some, batches, variant);
  EXPECT_EQ(full.losses, partial.losses);
  int trained = 0;
  for (size_t i = 0; i < before.size(); ++i) {
    const bool frozen = !some.weights()[i]->trainable();
    EXPECT_TRUE(test::same_bits(partial.weights[i], frozen ? before[i] : full.weights[i])) << some.weights()[i]->name();
    EXPECT_FALSE(test::same_bits(before[i], full.weights[i])) << some.weights()[i]->name();
    trained += frozen ? 0 : 1;
  }
  EXPECT_EQ(trained, 12);  // block 1: two norms and 2 MLP weights, block 2: 6, head: 2
}

TEST(Frozen, CostsNoBackwardGradientOrState) {
  Config config = frozen_config(kFirstBlocks, 2);
  config.optimizer.type = "adamw";
  config.pipeline.split = {3, 5};  // the whole first stage is frozen
  Trainer trainer(config);
  const StepResult result = trainer.step(random_batches(1, 2)[0], {"1f1b", P2Policy::kFill});
  EXPECT_EQ(result.report.stages[0].backward_p1, 0);
  EXPECT_EQ(result.report.stages[0].backward_p2, 0);
  EXPECT_GT(result.report.stages[1].backward_p1, 0);
  const auto at = [&](int stage, MemoryCategory category) {
    return result.report.stage_memory[static_cast<size_t>(stage)].now[static_cast<size_t>(category)];
  };
  EXPECT_EQ(at(0, MemoryCategory::kGradients), 0);
  EXPECT_EQ(at(0, MemoryCategory::kOptimizer), 0);
  int64_t trained = 0;
  for (const Parameter* weight : trainer.weights()) trained += weight->trainable() ? weight->numel() : 0;
  EXPECT_EQ(at(1, MemoryCategory::kGradients), trained * 4);
  EXPECT_EQ(at(0, MemoryCategory::kStash), 0);
}

TEST(Frozen, ProjectionsOfAMambaStay) {
  const auto batches = random_batches(2, 2);
  Config frozen = tiny_config();
  test::make_mamba(frozen).tied = true;
  frozen.pipeline.stages = 2;
  frozen.model.freeze = {"*.A_log", "*in_proj*", "*conv1d*"};
  Trainer trainer(frozen);
  const auto before = test::copies_of(trainer.weights());
  for (const Batch& batch : batches) trainer.step(batch, {"1f1b", P2Policy::kFill});
  const auto weights = trainer.weights();
  for (size_t i = 0; i < weights.size(); ++i) {
    const bool stays = weights[i]->name().find("A_log") != std::string::npos ||
                       weights[i]->name().find("in_proj") != std::string::npos ||
                       weights[i]->name().find("conv1d") != std::string::npos;
    EXPECT_EQ(test::same_bits(weights[i]->value, before[i]), stays) << weights[i]->name();
  }
}

TEST(Frozen, FreezingAllIsAnError) {
  Trainer trainer(frozen_config({"*"}));
  test::expect_error([&] { trainer.step(); }, {"nothing is trained", "model.freeze"});
}

// Half of the 18 layers are frozen.
Config half_frozen_config() {
  Config config = frozen_config(
      {"model.embed_tokens.weight", "model.layers.0.*", "model.layers.1.*", "model.layers.2.*", "model.layers.3.*"});
  test::llama_of(config).layers = 8;
  return config;
}

TEST(FrozenStages, AreMadeIfStepsAreFaster) {
  const ModelSpec model = build_model(half_frozen_config());
  ASSERT_EQ(model.first_trainable, 9);
  Profile costs;
  for (const LayerSpec& layer : model.layers)
    costs[layer.kind] = {.forward = 1, .backward_p1 = 1, .backward_p2 = 1, .p2_units = 1};
  PipelineOptions options;
  options.rank_of_stage = {0, 1};
  const auto with = [&](const Variant& variant, int micro_batches) {
    return with_frozen_stages(options, model, {{}, {costs}}, variant, micro_batches);
  };
  const PipelineOptions two = with({"1f1b", P2Policy::kFill}, 2);
  EXPECT_TRUE(two.frozen_stages);
  EXPECT_EQ(two.stages, 4);
  EXPECT_EQ(two.rank_of_stage, (std::vector<int>{0, 1, 0, 1}));
  EXPECT_LE(two.split[0] + two.split[1], 9);
  const SliceProfiles slices{{}, {costs}};
  const double before = simulated_seconds(model, slices, options, {"1f1b", P2Policy::kFill}, 2);
  EXPECT_LT(simulated_seconds(model, slices, two, {"1f1b", P2Policy::kFill}, 2), before);
  EXPECT_LT(simulated_seconds(model, slices, two, {"1f1b", P2Policy::kFill}, 2, /*next_known=*/true), 0.85 * before);
  EXPECT_FALSE(with({"1f1b", P2Policy::kFill}, 64).frozen_stages) << "the gain is too small";
  EXPECT_FALSE(with({"auto", P2Policy::kFill}, 2).frozen_stages);
  EXPECT_FALSE(with({ScheduleSource(make_schedule("1f1b", 2, 2, P2Policy::kOff)), P2Policy::kOff}, 2).frozen_stages);
  options.rank_of_stage = {0, 0};
  EXPECT_FALSE(with({"1f1b", P2Policy::kFill}, 2).frozen_stages);
}

TEST(FrozenStages, TrainToTheSameBits) {
  Config config = half_frozen_config();
  const auto batches = random_batches(3, 2);
  Trainer one(config);
  const auto expected = test::train(one, batches, {"1f1b", P2Policy::kOff});
  config.pipeline.stages = 0;
  config.pipeline.ranks = 2;
  int made = 0;
  for (int i = 0; i < 9 && made == 0; ++i) {  // the costs are measured
    Trainer two(config);
    made = two.pipeline().frozen_stages();
    const auto found = test::train(two, batches, {"zb-h1", P2Policy::kPlaced});
    EXPECT_TRUE(test::same_bits(expected.losses, found.losses));
    for (size_t w = 0; w < expected.weights.size(); ++w)
      EXPECT_TRUE(test::same_bits(expected.weights[w], found.weights[w])) << two.weights()[w]->name();
    EXPECT_TRUE(two.evaluate(batches[0], 1).has_value());
  }
  EXPECT_EQ(made, 2);
  config.pipeline.stages = 2;
  EXPECT_EQ(Trainer(config).pipeline().frozen_stages(), 0) << "pipeline.stages is what it says";
}

// The loader knows the next batch.
TEST(FrozenStages, ComputeAheadToTheSameBits) {
  Config config = half_frozen_config();
  config.train.steps = 6;
  config.pipeline.micro_batches = 2;
  Trainer one(config);
  config.pipeline.stages = 0;
  config.pipeline.ranks = 2;
  Trainer two(config);
  const auto losses_of = [](Trainer& trainer, int64_t steps) {
    std::vector<double> losses;
    while (trainer.steps_done() < steps) losses.push_back(trainer.step().loss);
    return losses;
  };
  EXPECT_TRUE(test::same_bits(losses_of(one, 3), losses_of(two, 3)));
  const TrainingPosition position = two.position();
  EXPECT_EQ(position.batches, one.position().batches) << "a batch counts when its step begins";
  two.go_on_from(position);
  EXPECT_TRUE(test::same_bits(losses_of(one, 6), losses_of(two, 6)));
  for (size_t w = 0; w < one.weights().size(); ++w)
    EXPECT_TRUE(test::same_bits(one.weights()[w]->value, two.weights()[w]->value)) << two.weights()[w]->name();
}

Config lora_config(int stages = 1) {
  Config config = tiny_config();
  config.model.lora = 3;
  config.model.lora_targets = {"q_proj", "v_proj", "down_proj"};
  config.pipeline.stages = stages;
  return config;
}

TEST(LoraTraining, FrozenAdaptersStayAndCostNothing) {
  Config config = lora_config(2);
  config.model.freeze = {"model.layers.0.*", "*.lora_A.weight"};
  for (const std::string precision : {"fp32", "bf16"}) {
    config.train.precision = precision;
    Trainer trainer(config);
    const auto before = test::copies_of(trainer.weights());
    test::train(trainer, random_batches(2, 2), {"1f1b", P2Policy::kFill});
    for (size_t i = 0; i < before.size(); ++i) {
      const std::string& name = trainer.weights()[i]->name();
      const bool trained = name.ends_with("lora_B.weight") && name.find("layers.0.") == std::string::npos;
      EXPECT_EQ(trained, !test::same_bits(before[i], trainer.weights()[i]->value)) << name;
    }
    EXPECT_FALSE(merged_weights(trainer.weights(), config.model).empty());
  }
}

TEST(LoraTraining, RefusesTargetsThatDoNotExist) {
  Config config = lora_config();
  config.model.lora_targets = {"q_proj", "v_porj"};
  test::expect_error([&] { Trainer trainer(config); }, {"model.lora_targets", "v_porj", "v_proj"});
  config.model.lora_targets = {"experts.down_proj"};
  test::expect_error([&] { Trainer trainer(config); },
                     {"model.lora_targets", "experts.down_proj is a tensor of experts", "has none", "down_proj"});
  config.model.lora_targets = {"embed_tokens"};
  test::expect_error([&] { Trainer trainer(config); }, {"model.lora_targets", "embed_tokens takes no adapter"});
  test::llama_of(config).tied = true;
  test::expect_error([&] { Trainer trainer(config); }, {"model.lora_targets", "input and the output embedding"});
}

// The merged weights, in a model without adapters, give the same logits, up to the rounding of one product.
TEST(LoraTraining, MergedWeightsGiveTheSameLoss) {
  const auto batches = random_batches(4, 2);
  Config config = lora_config();
  Trainer trainer(config);
  test::train(trainer, batches, {"1f1b", P2Policy::kFill});
  const NamedTensors merged = merged_weights(trainer.weights(), config.model);
  Trainer plain(tiny_config());
  ASSERT_LT(merged.size(), trainer.weights().size() * 3);
  for (const auto& [name, tensor] : merged) {
    EXPECT_EQ(name.find(".lora_"), std::string::npos);
    for (Parameter* weight : plain.weights()) {
      int64_t row = 0;
      for (const auto& part : weight->parts()) {
        if (part.name == name) weight->value.narrow(0, row, part.rows).copy_(tensor);
        row += part.rows;
      }
    }
  }
  const auto next = test::random_batch(2, 2, 2, 999);
  const double with_adapters = trainer.step(next, {"1f1b", P2Policy::kFill}).loss;
  const double with_merged = plain.step(next, {"1f1b", P2Policy::kFill}).loss;
  EXPECT_NEAR(with_adapters, with_merged, 1e-5 * with_adapters);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
