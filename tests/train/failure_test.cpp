// Tests weights that are not finite, data that does not fit, and models with too few layers. Each gives one Error that
// says where, for every number of stages, and no rank keeps waiting.
#include <limits>

#include <gtest/gtest.h>

#include "tests/train/helpers.h"
#include "tests/train/training.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/stage.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_error;
using test::random_batch;
using test::tiny_config;

Config config_of(const std::vector<int>& split, double clip_norm) {
  Config config = tiny_config();
  config.train.clip_norm = clip_norm;
  config.pipeline.stages = static_cast<int>(split.size());
  config.pipeline.split = split;
  config.pipeline.timeout = 10;
  return config;
}

// Changes one number of the first weight of a layer of the model.
void spoil(Trainer& trainer, int layer, float value) {
  Pipeline& pipeline = trainer.pipeline();
  for (int s = 0; s < pipeline.stages(); ++s) {
    Stage& stage = pipeline.stage(s);
    const int i = layer - stage.first_layer();
    if (i < 0 || i >= stage.layer_count()) continue;
    stage.parameters(i).back()->value.view({-1}).fill_(value);
  }
}

// The error names the layer with the weight, not a layer that received its output.
TEST(NotFinite, AWeightOnAnyStageNamesItsLayer) {
  for (const float value : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (const double clip_norm : {0.0, 1.0}) {
      for (const std::vector<int>& split : {std::vector<int>{8}, {3, 5}, {1, 2, 1, 3, 1}}) {
        for (const int layer : {0, 3, 4, 7}) {
          for (const P2Policy policy : {P2Policy::kOff, P2Policy::kFill}) {
            Trainer trainer(config_of(split, clip_norm));
            spoil(trainer, layer, value);
            const std::string name = trainer.pipeline().model().layers[layer].name;
            SCOPED_TRACE(concat(name, ", clip ", clip_norm, ", ", policy_name(policy), ", split ",
                                ::testing::PrintToString(split)));
            expect_error(
                [&] {
                  trainer.step(random_batch(3, 2, 2, 1), {"1f1b", policy});
                },
                {concat("weight of layer ", name, " is not finite"), "step 1"});
          }
        }
      }
    }
  }
}

TEST(NotFinite, AStreamedGradientThatOverflowsSaysThatWeightsHaveChanged) {
  Config config = config_of({3, 5}, 0);
  config.pipeline.gradients = "streamed";
  Trainer trainer(config);
  spoil(trainer, 7, 1e38F);
  expect_error(
      [&] {
        trainer.step(random_batch(3, 2, 2, 2), {"1f1b", P2Policy::kFill});
      },
      {"is not finite", "step 1", "have changed some weights", "checkpoint", "pipeline.gradients"});
}

// The weights are finite, but their gradients overflow. The error names the first layer in the backward pass where the
// overflow appears.
TEST(NotFinite, AGradientThatOverflowsNamesALayer) {
  for (const double clip_norm : {0.0, 1.0}) {
    for (const std::vector<int>& split : {std::vector<int>{8}, {3, 2, 3}}) {
      Trainer trainer(config_of(split, clip_norm));
      trainer.step(random_batch(3, 2, 2, 1), {"1f1b", P2Policy::kFill});
      spoil(trainer, 7, 1e38F);
      SCOPED_TRACE(concat("clip ", clip_norm, ", split ", ::testing::PrintToString(split)));
      expect_error(
          [&] {
            trainer.step(random_batch(3, 2, 2, 2), {"1f1b", P2Policy::kFill});
          },
          {"the gradient of layer ", "is not finite", "step 2", "optimizer.lr"});
    }
  }
}

TEST(NotFinite, TheTrainerRefusesToContinue) {
  Trainer trainer(config_of({3, 5}, 0));
  spoil(trainer, 2, std::numeric_limits<float>::quiet_NaN());
  expect_error([&] { trainer.step(random_batch(2, 2, 2, 1), {"1f1b"}); }, {"is not finite"});
  expect_error([&] { trainer.step(random_batch(2, 2, 2, 1), {"1f1b"}); }, {"failed in an earlier step"});
  expect_error([&] { trainer.step(random_batch(2, 2, 2, 1), {"gpipe", P2Policy::kOff}); }, {"earlier step"});
}

// A label that the data check would have caught reaches the last stage while the first stage is ahead.
TEST(BadBatch, NamesALabelBeyondTheVocabulary) {
  for (const std::vector<int>& split : {std::vector<int>{8}, {3, 5}, {3, 2, 3}}) {
    const int last = static_cast<int>(split.size()) - 1;
    Trainer trainer(config_of(split, 0));
    Batch batch = random_batch(3, 2, 2, 1);
    batch.micro_batches[1].at("labels").view({-1})[5] = test::kVocab;
    expect_error(
        [&] {
          trainer.step(batch, {"gpipe", P2Policy::kFill});
        },
        {concat("rank ", last, ", step 1, ", last, "F1:"), "label 64", "position 5"});
  }
}

TEST(BadBatch, NamesAMissingField) {
  Trainer trainer(config_of({3, 5}, 0));
  Batch batch = random_batch(2, 2, 2, 1);
  batch.micro_batches[0].erase("input_ids");
  expect_error([&] { trainer.step(batch, {"1f1b"}); }, {"rank 0, step 1, 0F0:", "input_ids", "labels"});
}

TEST(BadPipeline, WithMoreStagesThanLayersIsRefused) {
  Config config = tiny_config();
  config.pipeline.stages = 9;
  expect_error([&] { Trainer trainer(config); }, {"8 layers", "9 stages", "pipeline.stages"});
}

TEST(BadPipeline, WithASplitThatDoesNotAddUpIsRefused) {
  expect_error([&] { Trainer trainer(config_of({3, 4}, 0)); }, {"pipeline.split", "8 layers", "sum to 7"});
}

TEST(BadPipeline, ThatRecomputesNoLayerIsRefused) {
  Config config = tiny_config();
  config.pipeline.recompute = {"model.layer.*=both"};
  expect_error([&] { Trainer trainer(config); },
               {"pipeline.recompute: no layer is called \"model.layer.*\"", "did you mean \"model.layers."});
}

TEST(BadPipeline, WithAnUnknownScheduleIsRefused) {
  Trainer trainer(config_of({3, 5}, 0));
  expect_error([&] { trainer.step(random_batch(2, 2, 2, 1), {"1f2b"}); }, {"1f2b", "did you mean '1f1b'"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
