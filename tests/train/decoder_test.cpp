// Tests whole runs of every family of decoders: packed documents, reduced precision, LoRA and frozen weights.
// same_bits_test has their schedules, recomputation and dropout.
#include <cmath>

#include <gtest/gtest.h>

#include "tests/train/family_config.h"
#include "tests/train/training.h"
#include "twobp/nn/layers/lora_linear.h"
#include "twobp/train/build_model.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::Outcome;

class EveryFamily : public ::testing::TestWithParam<std::string> {
 protected:
  static Config config_of(int stages, const std::vector<std::string>& more = {}) {
    return test::family_config(decoder_family(GetParam()), stages, more);
  }
  static std::vector<Batch> batches() { return test::padded(test::random_batches(2, 3)); }
  static Outcome run(const Config& config, const Variant& variant) { return test::train(config, batches(), variant); }
};

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
    std::vector<std::string> sgd = {"train.steps=1", "optimizer.type=sgd", "optimizer.lr=0.1"};
    // It would count the padding, which no attention_mask names.
    for (const std::string key : {"balance_loss", "balance_rate"}) {
      if (has_option(decoder_family(GetParam()), key)) sgd.push_back(concat("model.", key, "=0"));
    }
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
  // A rounded score may choose another expert, so each token has all.
  std::vector<std::string> all;
  if (const int64_t experts = decoder_family(GetParam()).defaults.experts; experts > 0) {
    all.push_back(concat("model.experts_per_token=", experts));
  }
  if (has_option(decoder_family(GetParam()), "expert_groups")) all.emplace_back("model.chosen_groups=4");
  const Outcome exact = run(config_of(1, all), {"1f1b", P2Policy::kOff});
  all.emplace_back("train.precision=bf16");
  const Outcome rounded = run(config_of(2, all), {"1f1b", P2Policy::kFill});
  for (size_t i = 0; i < exact.losses.size(); ++i)
    EXPECT_NEAR(rounded.losses[i], exact.losses[i], 0.02 * exact.losses[i]) << i;
}

TEST_P(EveryFamily, TrainsOnlyAdapters) {
  const DecoderFamily& family = decoder_family(GetParam());
  std::string targets;
  const bool experts = family.defaults.experts > 0;
  std::vector<std::string> names = {family.names.qkv.front(),
                                    experts ? family.names.attention_output : family.names.mlp_output};
  if (experts) names.insert(names.end(), family.names.expert_modules.begin(), family.names.expert_modules.end());
  for (const std::string& name : names) targets += (targets.empty() ? "" : ",") + name;
  std::vector<std::string> keys = {"model.lora=2", "model.lora_targets=" + targets, "optimizer.lr=0.05"};
  if (has_option(family, "balance_rate")) keys.emplace_back("model.balance_rate=0");
  Trainer trainer(config_of(2, keys));
  const auto before = test::copies_of(trainer.weights());
  for (const Batch& batch : batches()) trainer.step(batch, {"1f1b", P2Policy::kFill});
  const auto& weights = trainer.weights();
  int changed = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    const bool same = test::same_bits(before[i], weights[i]->value);
    EXPECT_EQ(same, !is_adapter(weights[i]->name())) << weights[i]->name();
    changed += same ? 0 : 1;
  }
  const auto with_experts = static_cast<int>(3 - family.defaults.dense_layers);
  EXPECT_EQ(changed, (3 * 2 + (experts ? with_experts * 2 : 0)) * 2);  // blocks, targets, A and B
}

TEST_P(EveryFamily, KeepsFrozenWeights) {
  const DecoderFamily& family = decoder_family(GetParam());
  Trainer trainer(config_of(2, {"model.freeze=" + family.names.embedding + "*," + family.names.blocks + "0.*"}));
  const auto before = test::copies_of(trainer.weights());
  trainer.step(batches()[1], {"1f1b", P2Policy::kFill});
  for (size_t i = 0; i < before.size(); ++i) {
    const std::string& name = trainer.weights()[i]->name();
    const bool frozen = name.starts_with(family.names.embedding) || name.starts_with(family.names.blocks + "0.") ||
                        trainer.weights()[i]->counts_tokens();  // of no step
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
