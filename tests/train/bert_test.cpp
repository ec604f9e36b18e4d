// Tests whole runs of BERT with dropout, and the settings that a configuration of BERT may not have.
// bert_transformers_test compares them with autograd without the pipeline.
#include <gtest/gtest.h>

#include "tests/train/bert_batches.h"
#include "tests/train/helpers.h"
#include "tests/train/training.h"
#include "twobp/pipeline/pipeline.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_same_bits;
using test::Outcome;

constexpr int kSteps = 3;

Config config_of(bool tied, double dropout, const std::vector<int>& split) {
  Config config = test::tiny_config();
  test::make_bert(config, test::kSequence, dropout).tied = tied;
  config.train.clip_norm = 0.5;
  config.pipeline.stages = static_cast<int>(split.size());
  config.pipeline.split = split;
  return config;
}

TEST(BertRuns, EvaluationLeavesTrainingUntouched) {
  Config config = config_of(true, 0.2, {3, 5});
  config.data.held_out = 0.2;
  const auto batches = test::bert_batches(kSteps, 2);
  const Variant variant{"1f1b", P2Policy::kFill};
  const Outcome expected = test::train(config, batches, variant);
  Trainer trainer(config);
  Outcome actual;
  const auto evaluate = [&] {
    const auto first = trainer.evaluate();
    ASSERT_TRUE(first);
    EXPECT_EQ(trainer.evaluate(), first) << "a mask in evaluation";
  };
  for (const Batch& batch : batches) {
    evaluate();
    const StepResult result = trainer.step(batch, variant);
    actual.losses.push_back(result.loss);
    actual.norms.push_back(result.grad_norm);
    evaluate();
  }
  actual.weights = test::copies_of(trainer.weights());
  expect_same_bits(expected, actual, "with evaluations between");
}

// W is concatenated. The head's rows differ between micro-batches. The bound is that of concat_test for the 3
// * 2 * 16 rows of a batch: 2 sqrt(n) u sqrt(n) with n = 96 and u = 6e-8.
TEST(BertRuns, ConcatenatedP2GivesTheSameGradientsUpToRounding) {
  Config config = config_of(true, 0.2, {3, 5});
  test::make_plain_sgd(config);
  config.train.clip_norm = 0;
  const Batch batch = test::bert_batches(kSteps, 3).front();
  const auto gradients = [&](P2Batching batching) {
    return test::gradients_of(config, batch, {"1f1b", P2Policy::kEnd, batching});
  };
  const test::Gradients loop = gradients(P2Batching::kLoop), concat = gradients(P2Batching::kConcat);
  EXPECT_EQ(loop.step.loss, concat.step.loss);
  int other_bits = 0;
  for (size_t i = 0; i < loop.names.size(); ++i) {
    const double largest = loop.gradients[i].abs().max().item<double>();
    // This is the rounding of the subtraction.
    const double rounding = 1.2e-7 * loop.weights[i].abs().max().item<double>();
    EXPECT_GT(largest, 4 * rounding) << loop.names[i];
    EXPECT_LE((loop.gradients[i] - concat.gradients[i]).abs().max().item<double>(), 1.2e-5 * largest + 2 * rounding)
        << loop.names[i];
    other_bits += !test::same_bits(loop.gradients[i], concat.gradients[i]);
  }
  EXPECT_GT(other_bits, 0) << "nothing was concatenated";
}

TEST(BertRuns, LossFalls) {
  Config config = config_of(true, 0.1, {3, 5});
  const auto batches = test::bert_batches(kSteps, 2);
  Trainer trainer(config);
  const Variant variant{"1f1b", P2Policy::kFill};
  const double first = trainer.step(batches[0], variant).loss;
  double last = first;
  for (int i = 0; i < 40; ++i) last = trainer.step(batches[0], variant).loss;
  EXPECT_LT(last, 0.5 * first);
}

TEST(BertRuns, ReducedPrecisionIsClose) {
  const auto batches = test::bert_batches(kSteps, 2);
  const Variant variant{"1f1b", P2Policy::kFill};
  Config config = config_of(true, 0.2, {3, 5});
  const double exact = test::train(config, batches, variant).losses[0];
  for (const char* precision : {"bf16", "fp16"}) {
    config.train.precision = precision;
    EXPECT_NEAR(test::train(config, batches, variant).losses[0], exact, 0.02 * exact) << precision;
  }
}

TEST(BertRuns, LoraTrainsOnlyTheAdapters) {
  Config config = config_of(true, 0.2, {3, 5});
  config.model.lora = 2;
  config.model.lora_targets = {"query", "value", "output.dense"};
  const auto batches = test::bert_batches(kSteps, 2);
  Trainer trainer(config);
  const auto before = test::copies_of(trainer.weights());
  for (const Batch& batch : batches) trainer.step(batch, {"1f1b", P2Policy::kFill});
  for (size_t i = 0; i < before.size(); ++i) {
    const Parameter& parameter = *trainer.weights()[i];
    EXPECT_EQ(test::same_bits(parameter.value, before[i]), parameter.name().find("lora_") == std::string::npos)
        << parameter.name();
  }
}

TEST(BertConfig, RefusesContradictions) {
  const auto with = [](const std::vector<std::string>& settings, const std::vector<std::string>& parts) {
    std::vector<std::string> all = {"model.type=bert", "data.synthetic=tokens"};
    all.insert(all.end(), settings.begin(), settings.end());
    test::expect_error([&] { load_config("", all); }, parts);
  };
  with({"model.positions=128", "data.sequence=129"}, {"data.sequence (129)", "128 positions"});
  with({"model.heads=3"}, {"model.dim (256) is not divisible by model.heads (3)"});
  with({"model.kv_heads=2"}, {"model.kv_heads", "model.type is bert"});
  with({"model.head_dim=32"}, {"model.head_dim", "model.type is bert"});
  with({"model.dropout=1"}, {"model.dropout"});
  with({"model.attention_dropout=-0.5"}, {"model.attention_dropout"});
  with({"model.activation=\"relu\""}, {"model.activation", "gelu_tanh"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
