// Tests whole training runs against the same model on autograd in float64 with a plain optimizer. The loss is the mean
// over the counted targets of the global batch, in any micro-batch. Tied weights get the gradients of both uses.
// Clipping is the same as torch's.
//
// Tolerances: the library computes in float32 (unit roundoff u = 6e-8). A gradient here is a sum of at most n = 4 * 2 *
// 16 = 128 rows after about 40 operations in a row (3 blocks of 12, head). Each has a rounding error of u. If all have
// one sign, the error is (128 + 40) u = 1e-5 of the largest term. Terms are of the size of the largest gradient of the
// parameter. So gradients may differ by 1e-5 of their largest absolute value.
#include <cmath>

#include <gtest/gtest.h>

#include "tests/nn/llama_reference.h"
#include "tests/train/training.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/stage.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::LlamaReference;
using test::parts_of;
using test::random_batch;
using test::tiny_config;

constexpr double kGradientError = 1e-5;

double largest(const at::Tensor& t) {
  return t.abs().max().item<double>();
}

// Expects |a - b| <= bound for each element. a is in float32 and b in float64.
void expect_close(const at::Tensor& actual, const at::Tensor& expected, double bound, const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  EXPECT_LE(largest(actual.to(at::kDouble) - expected), bound) << what;
}

Config config_of(bool tied, int stages) {
  Config config = tiny_config();
  test::llama_of(config).tied = tied;
  config.pipeline.stages = stages;
  return config;
}

// SGD has lr 1 and no decay, so the weights move by exactly the gradient, up to the rounding of the subtraction (u
// times the weight).
Config gradient_config(bool tied, int stages) {
  Config config = config_of(tied, stages);
  config.optimizer.type = "sgd";
  config.optimizer.lr = 1;
  config.optimizer.weight_decay = 0;
  return config;
}

void expect_gradients(const Config& config, const Batch& batch, const Variant& variant) {
  Trainer trainer(config);
  LlamaReference reference(test::llama_of(config), trainer.weights());
  const double loss = reference.backward(batch.micro_batches);
  const StepResult result = trainer.step(batch, variant);
  // The loss is summed in double from float32 logits. 1e-6 of it is 16 u.
  EXPECT_NEAR(result.loss, loss, 1e-6 * loss);
  EXPECT_NEAR(result.grad_norm, reference.clip(0), kGradientError * result.grad_norm);
  for (const auto& [name, value] : parts_of(trainer.weights())) {
    const at::Tensor before = reference.weight(name).detach();
    const at::Tensor expected = reference.grad(name);
    const double bound = kGradientError * largest(expected) + 1.2e-7 * largest(before);
    expect_close(before - value, expected, bound, name);
    EXPECT_GT(largest(expected), 100 * bound) << name << ": the tolerance would hide the gradient";
  }
}

TEST(Autograd, EveryWeightHasItsGradient) {
  for (const int stages : {1, 2, 3}) {
    SCOPED_TRACE(concat(stages, " stages"));
    expect_gradients(gradient_config(false, stages), random_batch(4, 2, 2, 1), {"1f1b", P2Policy::kFill});
  }
}

// The micro-batches have 1, 32, 7 and 9 counted targets, and the last has another size. A mean of means would be wrong.
TEST(Autograd, LossIsTheMeanOverAllCountedTargetsOfTheGlobalBatch) {
  Batch batch = random_batch(4, 2, 1, 2);
  const std::vector<int64_t> keep = {1, 32, 7, 9};
  batch.targets = 0;
  for (size_t m = 0; m < keep.size(); ++m) {
    at::Tensor& labels = batch.micro_batches[m].at("labels");
    labels = batch.micro_batches[m].at("input_ids").clone();
    labels.view({-1}).slice(0, std::min(keep[m], labels.numel())).fill_(-100);
    batch.targets += test::counted(labels);
  }
  ASSERT_EQ(batch.targets, 1 + 32 + 7 + 9);
  for (const int stages : {1, 2}) {
    SCOPED_TRACE(concat(stages, " stages"));
    expect_gradients(gradient_config(false, stages), batch, {"1f1b", P2Policy::kFill});
  }
}

// A micro-batch without counted targets adds nothing, and there is no 0 / 0.
TEST(Autograd, AMicroBatchMayHaveNoTargets) {
  Batch batch = random_batch(3, 2, 2, 3);
  batch.targets -= test::counted(batch.micro_batches[1].at("labels"));
  batch.micro_batches[1].at("labels").fill_(-100);
  expect_gradients(gradient_config(false, 2), batch, {"1f1b", P2Policy::kFill});
}

// One weight has two uses: on one stage, on the two ends of the pipeline, and with stages between them.
TEST(Autograd, TiedWeightsGetTheGradientsOfBothUses) {
  for (const int stages : {1, 2, 5}) {
    for (const P2Policy policy : {P2Policy::kOff, P2Policy::kFill}) {
      SCOPED_TRACE(concat(stages, " stages, ", policy_name(policy)));
      expect_gradients(gradient_config(true, stages), random_batch(3, 2, 2, 4), {"gpipe", policy});
    }
  }
}

// Every use of a tied weight sees the update: ranks of one process have one weight. Its gradient is one, too.
TEST(Autograd, TiedWeightsStayEqualOnAllStages) {
  Config config = config_of(true, 3);
  config.pipeline.split = {2, 3, 3};
  Trainer trainer(config);
  for (const Batch& batch : test::random_batches(3, 2)) trainer.step(batch, {"1f1b", P2Policy::kFill});
  const Parameter* first = trainer.pipeline().stage(0).parameters(0).front();
  Parameter* last = nullptr;
  for (Parameter* parameter : trainer.pipeline().stage(2).parameters(2)) {
    if (parameter->name() == first->name()) last = parameter;
  }
  ASSERT_NE(last, nullptr);
  EXPECT_TRUE(test::same_bits(first->value, last->value));
  EXPECT_TRUE(first->value.is_alias_of(last->value));
  EXPECT_TRUE(first->grad.is_alias_of(last->grad));
}

// This compares the clipped gradient itself. Its size matters for SGD, but hardly for AdamW. The factor is clip / (norm
// + 1e-6). Its relative error is that of the norm, so both together give 2 * 1e-5.
TEST(Autograd, ClippedGradientsEqualTorchs) {
  for (const int stages : {1, 3}) {
    for (const bool tied : {false, true}) {
      Config config = gradient_config(tied, stages);
      config.train.clip_norm = 0.7;
      Trainer trainer(config);
      LlamaReference reference(test::llama_of(config), trainer.weights());
      const Batch batch = random_batch(3, 2, 1, 6);
      reference.backward(batch.micro_batches);
      const double norm = reference.clip(config.train.clip_norm);
      ASSERT_GT(norm, config.train.clip_norm);
      const StepResult result = trainer.step(batch, {"1f1b", P2Policy::kFill});
      EXPECT_NEAR(result.grad_norm, norm, kGradientError * norm) << "the norm before clipping";
      for (const auto& [name, value] : parts_of(trainer.weights())) {
        const at::Tensor before = reference.weight(name).detach();
        const at::Tensor expected = reference.grad(name);
        const double bound = 2 * kGradientError * largest(expected) + 1.2e-7 * largest(before);
        expect_close(before - value, expected, bound, name);
        EXPECT_GT(1e-3 * largest(expected), bound) << name << ": a factor that is 0.1 % off would not show";
      }
    }
  }
}

// If the norm is below the limit, the gradients keep their bits.
TEST(Autograd, GradientsBelowTheLimitAreNotClipped) {
  const auto batches = test::random_batches(3, 2);
  Config config = config_of(false, 2);
  const test::Outcome free = test::train(config, batches, {"1f1b", P2Policy::kFill});
  config.train.clip_norm = 1e6;
  test::expect_same_bits(free, test::train(config, batches, {"1f1b", P2Policy::kFill}), "clip_norm far above");
}

// This compares several steps with clipping. Adam's update is lr * m / (sqrt(v) + eps), with m and sqrt(v) of the size
// of g. An error e of g that is much smaller than eps moves it by at most 2 lr e / eps a step, because m and sqrt(v)
// are each at most e off. No clipped gradient is above 0.1 (checked), so e is at most 1e-5 * 0.1. With lr = 1e-2 and
// eps = 1e-3, five steps give 5 * 2e-5 = 1e-4. The weights move by 1e-2 (checked) to 5 lr = 5e-2. The loss is compared
// to first order: if weights differ by d, it changes by at most norm * |d|, times 2 for curvature.
void expect_adamw_run(bool tied, int stages, int micro_batches, const Variant& variant) {
  Config config = config_of(tied, stages);
  config.train.clip_norm = 0.5;
  config.optimizer.eps = 1e-3;
  config.optimizer.weight_decay = 0.1;
  Trainer trainer(config);
  LlamaReference reference(test::llama_of(config), trainer.weights());
  std::map<std::string, at::Tensor> first;
  std::map<std::string, at::Tensor> second;
  std::map<std::string, at::Tensor> start;
  for (const auto& [name, weight] : reference.weights()) {
    first[name] = at::zeros_like(weight.detach());
    second[name] = first[name].clone();
    start[name] = weight.detach().clone();
  }
  for (int i = 0; i < 5; ++i) {
    double distance = 0;
    for (const auto& [name, value] : parts_of(trainer.weights())) {
      distance += (value.to(at::kDouble) - reference.weight(name).detach()).square().sum().item<double>();
    }
    const Batch batch = random_batch(micro_batches, 2, i == 2 ? 1 : 2, 50 + i);
    const double loss = reference.backward(batch.micro_batches);
    const double norm = reference.clip(config.train.clip_norm);
    ASSERT_GT(norm, config.train.clip_norm) << "nothing was clipped";
    const StepResult result = trainer.step(batch, variant);
    EXPECT_NEAR(result.loss, loss, 1e-6 * loss + 2 * norm * std::sqrt(distance)) << "step " << i;
    if (i == 0) {
      EXPECT_NEAR(result.grad_norm, norm, kGradientError * norm);
    }
    const at::Tensor step = at::full({}, i + 1, at::kFloat);
    for (const auto& [name, weight] : reference.weights()) {
      at::Tensor value = weight.detach();
      at::Tensor grad = reference.grad(name);
      ASSERT_LT(largest(grad), 0.1) << name;
      const double decay = value.dim() > 1 ? config.optimizer.weight_decay : 0;
      at::_fused_adamw_({value}, {grad}, {first[name]}, {second[name]}, {}, {step}, config.optimizer.lr,
                        config.optimizer.beta1, config.optimizer.beta2, decay, config.optimizer.eps, false, false);
    }
  }
  for (const auto& [name, value] : parts_of(trainer.weights())) {
    expect_close(value, reference.weight(name).detach(), 1e-4, name);
    EXPECT_GT(largest(reference.weight(name).detach() - start[name]), 1e-2) << name << " did not move";
  }
}

TEST(Autograd, SeveralStepsOfAdamWWithClippingAgree) {
  expect_adamw_run(false, 1, 1, {"naive", P2Policy::kOff});
  expect_adamw_run(false, 2, 3, {"1f1b", P2Policy::kFill});
  expect_adamw_run(true, 3, 4, {"gpipe", P2Policy::kEnd});
}

// Evaluation is the mean over the targets of the held-out part. It only runs forward.
TEST(Autograd, EvaluationIsTheMeanOverTheHeldOutTargets) {
  Config config = config_of(false, 2);
  config.data.held_out = 7.0 / 1024;  // 7 of the 1024 synthetic samples; the batch has 4
  config.pipeline.micro_batches = 2;
  Trainer trainer(config);
  const Dataset& held_out = *trainer.data().held_out;
  ASSERT_EQ(held_out.size(), 7);
  const Batch all = read_batch(held_out, {0, 1, 2, 3, 4, 5, 6}, 0, 7);
  LlamaReference reference(test::llama_of(config), trainer.weights());
  const auto loss = trainer.evaluate();
  ASSERT_TRUE(loss.has_value());
  const double expected = reference.backward(all.micro_batches);
  EXPECT_NEAR(loss->loss, expected, 1e-6 * expected);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
