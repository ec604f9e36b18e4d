// Tests whole runs of every family of decoders. The bits do not depend on schedules, cuts and recomputation, with
// padding and with windows that are shorter than the sequence. Also tests reduced precision, LoRA, frozen weights and
// dropout.
#include <cmath>

#include <gtest/gtest.h>

#include "tests/train/training.h"
#include "twobp/models/decoder/family.h"
#include "twobp/nn/layers/lora_linear.h"
#include "twobp/train/build_model.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_same_bits;
using test::Outcome;

class EveryFamily : public ::testing::TestWithParam<std::string> {
 protected:
  // The configuration uses the family's features: windows on some layers, layers without rotary embedding, caps,
  // multipliers.
  static Config config_of(int stages, const std::vector<std::string>& more = {}) {
    const DecoderFamily& family = decoder_family(GetParam());
    std::vector<std::string> keys = {"model.type=" + family.name,
                                     "model.dim=24",
                                     "model.layers=3",
                                     "model.heads=3",
                                     "model.hidden=40",
                                     concat("model.vocab=", test::kVocab),
                                     "model.init_std=0.2",
                                     "data.synthetic=tokens",
                                     concat("data.sequence=", test::kSequence),
                                     "data.held_out=0",
                                     "pipeline.micro_batches=3",
                                     "pipeline.micro_batch_size=2",
                                     "pipeline.pin=false",
                                     concat("pipeline.stages=", stages),
                                     "optimizer.schedule=constant",
                                     "optimizer.lr=0.01",
                                     "train.steps=2",
                                     "train.clip_norm=1"};
    for (const auto& [option, value] : {std::pair{"kv_heads", "1"},
                                        {"windows", "5,0"},
                                        {"rope_layers", "1,0"},
                                        {"attention_bias", "true"},
                                        {"attention_cap", "2"},
                                        {"logit_cap", "3"},
                                        {"residual_scale", "0.5"},
                                        {"positions", "40"},
                                        {"rope_part", "0.5"},
                                        {"attention_scale", "0.4"},
                                        {"pad_token", "3"}}) {
      const bool one_window = std::string(option) == "windows" && family.windows == WindowsInFile::kEvery;
      if (has_option(family, option)) keys.push_back(concat("model.", option, "=", one_window ? "5" : value));
    }
    keys.insert(keys.end(), more.begin(), more.end());
    return load_config("", keys);
  }
  static std::vector<Batch> batches() { return test::padded(test::random_batches(2, 3)); }
  static Outcome run(const Config& config, const Variant& variant) { return test::train(config, batches(), variant); }
};

TEST_P(EveryFamily, HasTheSameBitsForEveryScheduleAndCut) {
  const Outcome expected = run(config_of(1), {"gpipe", P2Policy::kOff});
  for (const double loss : expected.losses) EXPECT_TRUE(std::isfinite(loss));
  EXPECT_NE(expected.losses[0], expected.losses[1]);
  expect_same_bits(expected, run(config_of(2), {"1f1b", P2Policy::kFill}), "two stages");
  Config uneven = config_of(4);
  uneven.pipeline.split = {2, 3, 1, 2};  // stages end between the halves of a block
  expect_same_bits(expected, run(uneven, {"1f1b", P2Policy::kCooldown}), "four stages");
  Config recomputing = config_of(2);
  recomputing.pipeline.recompute = {"both"};
  expect_same_bits(expected, run(recomputing, {"1f1b", P2Policy::kEnd}), "recomputed");
}

TEST_P(EveryFamily, TrainsWithDropoutToTheSameBits) {
  const auto config = [](int stages) {
    std::vector<std::string> keys = {"model.attention_dropout=0.2"};
    if (has_option(decoder_family(GetParam()), "dropout")) keys.emplace_back("model.dropout=0.1");
    return config_of(stages, keys);
  };
  const Outcome expected = run(config(1), {"gpipe", P2Policy::kOff});
  EXPECT_NE(expected.losses[0], run(config_of(1), {"gpipe", P2Policy::kOff}).losses[0]);
  Config recomputing = config(3);
  recomputing.pipeline.recompute = {"both"};
  expect_same_bits(expected, run(recomputing, {"1f1b", P2Policy::kFill}), "three stages");
}

// The same documents stand in one sample with padding after them, and each in a sample of its own.
TEST_P(EveryFamily, KeepsPackedDocumentsApart) {
  const std::vector<int64_t> lengths = {5, 1, 7};
  const Fields tokens = test::random_fields(1, 3);
  const auto empty = [](int64_t samples) {
    return Fields{{"input_ids", at::zeros({samples, test::kSequence}, at::kLong)},
                  {"labels", at::full({samples, test::kSequence}, -100, at::kLong)}};
  };
  Fields packed = empty(1);
  Fields alone = empty(3);
  at::Tensor starts = at::arange(test::kSequence, at::kLong).unsqueeze(0).clone();
  for (int64_t begin = 0, i = 0; i < 3; begin += lengths[static_cast<size_t>(i++)]) {
    const int64_t length = lengths[static_cast<size_t>(i)];
    for (const char* field : {"input_ids", "labels"}) {
      const at::Tensor part = tokens.at(field)[0].narrow(0, begin, length);
      packed[field][0].narrow(0, begin, length).copy_(part);
      alone[field][i].narrow(0, 0, length).copy_(part);
    }
    starts[0].narrow(0, begin, length).fill_(begin);
  }
  Fields joined = packed;  // without the field that keeps them apart
  packed["document_starts"] = starts;
  const auto train = [&](const Fields& fields) {
    const std::vector<std::string> sgd = {"train.steps=1", "optimizer.type=sgd", "optimizer.lr=0.1"};
    return test::train(config_of(2, sgd), {make_batch({fields})}, {"1f1b", P2Policy::kFill});
  };
  const Outcome expected = train(alone);
  const Outcome actual = train(packed);
  EXPECT_NEAR(actual.losses[0], expected.losses[0], 2e-6 * expected.losses[0]);
  EXPECT_NEAR(actual.norms[0], expected.norms[0], 2e-5 * expected.norms[0]);
  EXPECT_GT(std::abs(train(joined).losses[0] - expected.losses[0]), 1e-4);
  ASSERT_EQ(actual.weights.size(), expected.weights.size());
  for (size_t i = 0; i < expected.weights.size(); ++i)
    // The weights move by 0.1 in all.
    EXPECT_LT((actual.weights[i] - expected.weights[i]).norm().item<double>(), 2e-6) << i;
}

TEST_P(EveryFamily, TrainsInReducedPrecision) {
  const Outcome exact = run(config_of(1), {"1f1b", P2Policy::kOff});
  const Outcome rounded = run(config_of(2, {"train.precision=bf16"}), {"1f1b", P2Policy::kFill});
  for (size_t i = 0; i < exact.losses.size(); ++i)
    EXPECT_NEAR(rounded.losses[i], exact.losses[i], 0.02 * exact.losses[i]) << i;
}

TEST_P(EveryFamily, TrainsOnlyAdapters) {
  const DecoderFamily& family = decoder_family(GetParam());
  std::string targets;
  for (const std::string& name : {family.names.qkv.front(), family.names.mlp_output})
    targets += (targets.empty() ? "" : ",") + name;
  Trainer trainer(config_of(2, {"model.lora=2", "model.lora_targets=" + targets, "optimizer.lr=0.05"}));
  const auto before = test::copies_of(trainer.weights());
  for (const Batch& batch : batches()) trainer.step(batch, {"1f1b", P2Policy::kFill});
  const auto& weights = trainer.weights();
  int changed = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    const bool same = test::same_bits(before[i], weights[i]->value);
    EXPECT_EQ(same, !is_adapter(weights[i]->name())) << weights[i]->name();
    changed += same ? 0 : 1;
  }
  EXPECT_EQ(changed, 3 * 2 * 2);  // blocks, targets, A and B
}

TEST_P(EveryFamily, KeepsFrozenWeights) {
  const DecoderFamily& family = decoder_family(GetParam());
  Trainer trainer(config_of(2, {"model.freeze=" + family.names.embedding + "*," + family.names.blocks + "0.*"}));
  const auto before = test::copies_of(trainer.weights());
  trainer.step(batches()[1], {"1f1b", P2Policy::kFill});
  for (size_t i = 0; i < before.size(); ++i) {
    const std::string& name = trainer.weights()[i]->name();
    const bool frozen = name.starts_with(family.names.embedding) || name.starts_with(family.names.blocks + "0.");
    EXPECT_EQ(test::same_bits(before[i], trainer.weights()[i]->value), frozen) << name;
  }
}

std::vector<std::string> family_names() {
  std::vector<std::string> names;
  for (const DecoderFamily& family : decoder_families()) names.push_back(family.name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(Decoders, EveryFamily, ::testing::ValuesIn(family_names()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace twobp::TWOBP_FILE
