// Tests whole runs with recomputation: running statistics, concatenation, evaluation, a run that changes the mode, and
// settings that are refused. same_bits_test has all models and modes.
#include <tuple>

#include <gtest/gtest.h>

#include "tests/model_options.h"
#include "tests/train/checkpoint_runs.h"
#include "tests/train/resnet_training.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/train/build_model.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_error;
using test::expect_same_bits;
using test::Outcome;

constexpr int kStepsOfRun = 2;
constexpr int kMicroBatches = 3;

Config llama_config() {
  return test::tiny_config();
}

Config bert_config() {
  Config config = test::tiny_config();
  test::make_bert(config, test::kSequence, 0.2);
  return config;
}

Config mamba_config() {
  Config config = test::tiny_config();
  test::llama_of(config).dim = 64;
  test::make_mamba(config).state = 5;
  return config;
}

std::vector<Batch> batches_for(const Config& config) {
  return config.model.type.name() == "resnet" ? test::image_batches(config, kStepsOfRun, kMicroBatches)
                                              : test::random_batches(kStepsOfRun, kMicroBatches);
}

// same_bits_test compares all weights, which include buffers. This test checks that they exist and that they move.
TEST(RecomputeResnet, RunningStatisticsAreTheSame) {
  Config config = test::tiny_resnet("bottleneck");
  const auto batches = test::image_batches(config, kStepsOfRun, kMicroBatches);
  Trainer plain(config);
  const auto before = test::copies_by_name(plain.weights(), /*buffers_only=*/true);
  test::train(plain, batches, {"1f1b", P2Policy::kFill});
  const auto expected = test::copies_by_name(plain.weights(), /*buffers_only=*/true);
  ASSERT_FALSE(expected.empty());
  for (const auto& [name, value] : expected) EXPECT_FALSE(test::same_bits(value, before.at(name))) << name;
  config.pipeline.stages = 2;
  for (const char* mode : {"*=activations", "*=derivatives", "*=both"}) {
    config.pipeline.recompute = {mode};
    Trainer trainer(config);
    test::train(trainer, batches, {"1f1b", P2Policy::kFill});
    test::expect_same(test::copies_by_name(trainer.weights(), /*buffers_only=*/true), expected, mode);
  }
}

// With `concat`, rounding shows which micro-batches share a GEMM. This depends on the moment when W runs, and so on the
// split into stages, which is given here. If a cap is reached, it also depends on the bytes held, which recomputation
// changes. So no cap is reached here.
constexpr int64_t kAmpleCap = int64_t{1} << 40;

std::vector<Config> concatenating_configs() {
  std::vector<Config> configs = {llama_config(), bert_config(), mamba_config()};
  for (Config& config : configs) {
    config.pipeline.stages = 2;
    config.pipeline.split = {4, 4};
  }
  return configs;
}

// The mode "activations" does not change W.
TEST(RecomputeRuns, ActivationsDoNotChangeConcatenation) {
  for (Config config : concatenating_configs()) {
    const auto batches = batches_for(config);
    const Outcome loop = test::train(config, batches, {"1f1b", P2Policy::kEnd});
    for (const int64_t cap : {int64_t{0}, kAmpleCap}) {
      const Variant variant{"1f1b", P2Policy::kEnd, P2Batching::kConcat, cap};
      const std::string what = concat(config.model.type.name(), ", cap ", cap);
      config.pipeline.recompute = {};
      const Outcome expected = test::train(config, batches, variant);
      EXPECT_FALSE(test::same_bits(expected.norms, loop.norms)) << what << " concatenates nothing";
      for (const char* mode : {"activations", "*=activations"}) {
        config.pipeline.recompute = {mode};
        expect_same_bits(expected, test::train(config, batches, variant), concat(what, ", ", mode));
      }
    }
  }
}

// Recomputed derivatives are never concatenated. Under any cap, the result is that of `loop`.
TEST(RecomputeRuns, DerivativesAreNotConcatenated) {
  for (Config config : concatenating_configs()) {
    const auto batches = batches_for(config);
    const Outcome loop = test::train(config, batches, {"1f1b", P2Policy::kEnd});
    for (const MemoryCap& cap : {MemoryCap(0), MemoryCap(kAmpleCap), MemoryCap::automatic()}) {
      const Variant variant{"1f1b", P2Policy::kEnd, P2Batching::kConcat, cap};
      for (const char* mode : {"*=derivatives", "*=both"}) {
        config.pipeline.recompute = {mode};
        expect_same_bits(loop, test::train(config, batches, variant),
                         concat(config.model.type.name(), ", ", cap, ", ", mode));
      }
    }
  }
}

TEST(RecomputeRuns, EvaluateTheSame) {
  for (Config config : {llama_config(), test::tiny_resnet("basic")}) {
    config.data.held_out = 0.2;
    const auto batches = batches_for(config);
    Trainer plain(config);
    test::train(plain, batches, {"1f1b", P2Policy::kFill});
    config.pipeline.recompute = {"*=both"};
    Trainer trainer(config);
    test::train(trainer, batches, {"1f1b", P2Policy::kFill});
    const auto expected = plain.evaluate();
    ASSERT_TRUE(expected);
    EXPECT_EQ(trainer.evaluate(), expected) << config.model.type.name();
  }
}

// The run is stopped and resumed with another mode. The result does not change, and there is no note.
TEST(RecomputeRuns, ResumeMayChangeIt) {
  const test::TempFolder folder;
  Config config = test::checkpoint_config(folder);
  config.save.checkpoints = folder.path("whole");
  const test::RunResult whole = test::run(config);
  config.save.checkpoints = folder.path("parts");
  config.pipeline.recompute = {"activations"};
  test::run(config, /*resume=*/false, 2);
  config.pipeline.recompute = {"stage:0=both", "stage:1=derivatives"};
  const test::RunResult second = test::run(config, /*resume=*/true);
  EXPECT_EQ(second.first_step, 2);
  EXPECT_TRUE(second.notes.empty()) << second.notes.front();
  ASSERT_EQ(second.outcome.weights.size(), whole.outcome.weights.size());
  for (size_t i = 0; i < whole.outcome.weights.size(); ++i) {
    EXPECT_TRUE(test::same_bits(second.outcome.weights[i], whole.outcome.weights[i])) << i;
  }
  EXPECT_TRUE(test::same_bits(second.outcome.losses,
                              std::vector<double>(whole.outcome.losses.begin() + 2, whole.outcome.losses.end())));
}

TEST(RecomputeSettings, ShowInTheKindsOfLayers) {
  Config config = llama_config();
  config.pipeline.recompute = {"both", "*.mlp=none"};
  const ModelSpec model = build_model(config);
  EXPECT_EQ(model.layers[0].kind, "embedding");
  EXPECT_EQ(model.layers[1].kind, "attention+both");
  EXPECT_EQ(model.layers[2].kind, "mlp");
  EXPECT_EQ(model.layers.back().kind, "head");
}

TEST(RecomputeSettings, RefuseBadModes) {
  const auto refuse = [](const std::string& set, const std::vector<std::string>& parts) {
    expect_error([&] { load_config("", {"data.synthetic=tokens", set}); }, parts);
  };
  refuse("pipeline.recompute=activation", {"pipeline.recompute: ", "'activation'", "'activations'"});
  refuse("pipeline.recompute=both,x.*=all", {"pipeline.recompute: ", "'all'"});
  refuse("pipeline.recompute==both", {"pipeline.recompute: ", "names no layers"});
  refuse("pipeline.recompute=stage:one=both", {"pipeline.recompute: ", "no stage number"});
  refuse("pipeline.recompute=stage:0=both", {"pipeline.recompute: ", "needs pipeline.split"});
  refuse("pipeline.recompute=[1]", {"pipeline.recompute", "list of texts"});
  Config config = llama_config();
  config.pipeline.recompute = {"model.layer.*=both"};
  expect_error([&] { build_model(config); },
               {"pipeline.recompute: no layer is called \"model.layer.*\"", "did you mean \"model.layers."});
  config.pipeline.recompute = {"stage:1=both"};
  config.pipeline.split = {8};
  expect_error([&] { build_model(config); }, {"pipeline.recompute: stage:1 does not exist"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
