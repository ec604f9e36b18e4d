// Tests concatenated backward-p2. It gives up bitwise equality for the Linear weights only, and only by rounding: the
// gradient of a weight is summed over micro-batches in another order.
//
// The bound: a gradient element is a sum of n = M * 2 * 16 <= 128 products. Two orders of float32 additions differ by
// at most 2 n u times the sum of the products' magnitudes (u = 6e-8). That sum is at most n times the largest product.
// Gradients here have elements of the size of sqrt(n) products of random signs. So relative to the largest element, the
// bound is 2 n u * n / sqrt(n) = 1.7e-4. With rounding errors of random signs, it is 2 sqrt(n) u * sqrt(n) = 1.5e-5.
// The tests use the latter.
#include <gtest/gtest.h>

#include "tests/train/training.h"
#include "twobp/pipeline/pipeline.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::Gradients;
using test::gradients_of;
using test::Outcome;
using test::same_bits;
using test::tiny_config;

constexpr double kBound = 1.5e-5;

Config config_of(const std::vector<int>& split) {
  Config config = tiny_config();
  test::make_plain_sgd(config);
  config.pipeline.stages = static_cast<int>(split.size());
  config.pipeline.split = split;
  return config;
}

double largest(const at::Tensor& t) {
  return t.abs().max().item<double>();
}

void expect_within_bound(const std::vector<int>& split, const Batch& batch, const Variant& variant) {
  SCOPED_TRACE(concat(::testing::PrintToString(split), " ", variant.schedule, " ", policy_name(variant.policy), " ",
                      batching_name(variant.batching), " M ", batch.micro_batches.size()));
  const Gradients loop = gradients_of(config_of({test::kLayers}), batch, {"gpipe", P2Policy::kOff});
  const Gradients concatenated = gradients_of(config_of(split), batch, variant);
  EXPECT_EQ(loop.step.loss, concatenated.step.loss) << "the forward pass does not concatenate";
  for (size_t i = 0; i < loop.names.size(); ++i) {
    const std::string& name = loop.names[i];
    const bool linear = name.find("_proj") != std::string::npos || name.find("lm_head") != std::string::npos;
    if (linear) {
      // The rounding of the subtraction from the weight is added.
      const double bound = kBound * largest(loop.gradients[i]) + 2 * 1.2e-7 * largest(loop.weights[i]);
      EXPECT_LE(largest(loop.gradients[i] - concatenated.gradients[i]), bound) << name;
    } else {
      EXPECT_TRUE(same_bits(loop.gradients[i], concatenated.gradients[i])) << name << " has no concatenated p2";
    }
  }
}

TEST(Concat, GradientsAreWithinTheBoundOfTheLoop) {
  for (const std::vector<int>& split : {std::vector<int>{8}, {3, 5}, {3, 2, 3}}) {
    for (const char* schedule : {"naive", "gpipe", "1f1b"}) {
      for (const P2Policy policy : {P2Policy::kOff, P2Policy::kEnd, P2Policy::kCooldown, P2Policy::kFill}) {
        expect_within_bound(split, test::random_batch(4, 2, 2, 5), {schedule, policy, P2Batching::kConcat});
      }
    }
  }
}

TEST(Concat, TakesAShorterLastMicroBatch) {
  for (const int micro_batches : {2, 3, 4}) {
    expect_within_bound({3, 5}, test::random_batch(micro_batches, 2, 1, 6),
                        {"1f1b", P2Policy::kFill, P2Batching::kConcat});
    expect_within_bound({3, 5}, test::random_batch(micro_batches, 2, 1, 6),
                        {"gpipe", P2Policy::kEnd, P2Batching::kConcat});
  }
}

// 1F1B over two stages holds two of seven micro-batches. Under a cap, W runs for some of them at a time.
TEST(Concat, KeepsTheBoundUnderACap) {
  for (const P2Policy policy : {P2Policy::kEnd, P2Policy::kFill}) {
    expect_within_bound({3, 5}, test::random_batch(7, 1, 1, 7), {"1f1b", policy, P2Batching::kConcat});
    expect_within_bound({3, 5}, test::random_batch(7, 1, 1, 7), {"1f1b", policy, P2Batching::kConcat, 0});
    expect_within_bound({3, 5}, test::random_batch(7, 1, 1, 7), {"1f1b", policy, P2Batching::kConcat, 1});
  }
}

// One micro-batch has no other to be concatenated with.
TEST(Concat, OneMicroBatchIsBitwiseEqual) {
  const auto batches = test::random_batches(3, 1);
  Config config = tiny_config();
  const Outcome loop = test::train(config, batches, {"1f1b", P2Policy::kFill});
  test::expect_same_bits(loop, test::train(config, batches, {"1f1b", P2Policy::kFill, P2Batching::kConcat}), "concat");
}

// Batches shrink and grow again, and the batching changes.
TEST(Concat, KeepsTheBoundOverStepsOfChangingSizes) {
  const std::vector<Batch> batches = {test::random_batch(2, 1, 1, 1), test::random_batch(4, 2, 2, 2),
                                      test::random_batch(3, 2, 1, 3), test::random_batch(4, 2, 2, 4)};
  Config config = tiny_config();
  config.pipeline.stages = 2;
  config.pipeline.split = {3, 5};
  // As in autograd_test, an error e of a gradient below 0.2 moves AdamW by at most 2 lr e / eps = 2e-2 * 3e-6 / 1e-3.
  config.optimizer.eps = 1e-3;
  config.train.clip_norm = 0.5;
  constexpr double kPerStep = 6e-5;
  const Outcome loop = test::train(config, batches, {"1f1b", P2Policy::kFill});
  for (const P2Batching first : {P2Batching::kLoop, P2Batching::kConcat}) {
    for (const P2Batching second : {P2Batching::kLoop, P2Batching::kConcat}) {
      Trainer trainer(config);
      for (size_t i = 0; i < batches.size(); ++i) {
        trainer.step(batches[i], {"1f1b", P2Policy::kFill, i < 2 ? first : second});
      }
      for (size_t i = 0; i < loop.weights.size(); ++i) {
        EXPECT_LE(largest(loop.weights[i] - trainer.weights()[i]->value), 4 * kPerStep)
            << batching_name(first) << " then " << batching_name(second) << ", " << trainer.weights()[i]->name();
      }
    }
  }
}

// With `concat`, rounding shows which micro-batches share a GEMM. This depends on the moment when W runs, and so on the
// split into stages, which is given here. If a cap is reached, it also depends on the bytes held, which recomputation
// changes. So no cap is reached here.
constexpr int64_t kAmpleCap = int64_t{1} << 40;

std::vector<Config> concatenating_configs() {
  std::vector<Config> configs(3, tiny_config());
  test::make_bert(configs[1], test::kSequence, 0.2);
  test::llama_of(configs[2]).dim = 64;
  test::make_mamba(configs[2]).state = 5;
  for (Config& config : configs) {
    config.pipeline.stages = 2;
    config.pipeline.split = {4, 4};
  }
  return configs;
}

// The mode "activations" does not change W.
TEST(RecomputeRuns, ActivationsDoNotChangeConcatenation) {
  for (Config config : concatenating_configs()) {
    const auto batches = test::random_batches(2, 3);
    const Outcome loop = test::train(config, batches, {"1f1b", P2Policy::kEnd});
    for (const int64_t cap : {int64_t{0}, kAmpleCap}) {
      const Variant variant{"1f1b", P2Policy::kEnd, P2Batching::kConcat, cap};
      const std::string what = concat(config.model.type.name(), ", cap ", cap);
      config.pipeline.recompute = {};
      const Outcome expected = test::train(config, batches, variant);
      EXPECT_FALSE(test::same_bits(expected.norms, loop.norms)) << what << " concatenates nothing";
      for (const char* mode : {"activations", "*=activations"}) {
        config.pipeline.recompute = {mode};
        test::expect_same_bits(expected, test::train(config, batches, variant), concat(what, ", ", mode));
      }
    }
  }
}

// Recomputed derivatives are never concatenated. Under any cap, the result is that of `loop`.
TEST(RecomputeRuns, DerivativesAreNotConcatenated) {
  for (Config config : concatenating_configs()) {
    const auto batches = test::random_batches(2, 3);
    const Outcome loop = test::train(config, batches, {"1f1b", P2Policy::kEnd});
    for (const MemoryCap& cap : {MemoryCap(0), MemoryCap(kAmpleCap), MemoryCap::automatic()}) {
      const Variant variant{"1f1b", P2Policy::kEnd, P2Batching::kConcat, cap};
      for (const char* mode : {"*=derivatives", "*=both"}) {
        config.pipeline.recompute = {mode};
        test::expect_same_bits(loop, test::train(config, batches, variant),
                               concat(config.model.type.name(), ", ", cap, ", ", mode));
      }
    }
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
