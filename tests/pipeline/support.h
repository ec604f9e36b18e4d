// The pipeline tests share these helpers: small models, layers that call the test back, pipelines without an optimizer,
// and the gradients of a step.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include "tests/expect_error.h"
#include "twobp/core/check.h"
#include "twobp/models/decoder/family.h"
#include "twobp/models/models.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/stage.h"
#include "twobp/schedule/check/validate.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/passes.h"

namespace twobp::test {

inline constexpr int64_t kDim = 16;
inline constexpr int64_t kHidden = 24;
inline constexpr int64_t kBatch = 2;
inline constexpr int64_t kSequence = 5;
inline constexpr int64_t kRows = kBatch * kSequence;
inline constexpr int64_t kFloat = 4;  // bytes
inline constexpr double kTimeout = 30;

// Makes a stack of MLP blocks with a squared error at the end.
inline ModelSpec small_mlp(int64_t layers) {
  MlpOptions options;
  options.dim = kDim;
  options.layers = layers;
  options.hidden = kHidden;
  options.init_std = 0.3;
  return mlp(options);
}

inline ModelSpec small_llama(int64_t blocks) {
  DecoderOptions options;
  options.vocab = 40;
  options.dim = kDim;
  options.layers = blocks;
  options.heads = 4;
  options.kv_heads = 2;
  options.head_dim = 4;
  options.hidden = kHidden;
  options.init_std = 0.3;
  return llama(options);
}

// Makes every field that any of the models reads.
inline Fields random_fields(uint64_t seed, int64_t samples = kBatch) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return {{"input", at::randn({samples, kSequence, kDim}, generator)},
          {"target", at::randn({samples, kSequence, kDim}, generator)},
          {"input_ids", at::randint(0, 40, {samples, kSequence}, generator, at::kLong)},
          {"labels", at::randint(0, 40, {samples, kSequence}, generator, at::kLong)}};
}

inline std::vector<Fields> random_batch(int micro_batches) {
  std::vector<Fields> batch;
  for (int m = 0; m < micro_batches; ++m) batch.push_back(random_fields(m + 1));
  return batch;
}

// This identity layer calls back, so that a test can watch, delay or break the middle of a step. Its backward-p2 is a
// unit of its own.
struct Hooks {
  std::function<void(const Context&)> forward;
  std::function<void(const Context&)> backward_p1;
  std::function<void(int64_t micro_batch)> backward_p2;
};

class Probe : public Layer {
 public:
  explicit Probe(std::shared_ptr<Hooks> hooks) : hooks_(std::move(hooks)) {}

  Values forward(Values x, Context& context, Saved&) override {
    if (hooks_->forward) hooks_->forward(context);
    return x;
  }
  Values backward_p1(Values dy, Context& context, Saved& saved) override {
    if (hooks_->backward_p1) hooks_->backward_p1(context);
    if (hooks_->backward_p2) saved.keep_until_p2(at::scalar_tensor(context.micro_batch, at::kLong));
    return dy;
  }
  void backward_p2(std::span<Saved* const> saved) override {
    for (const Saved* one : saved) hooks_->backward_p2(one->p2(0).item<int64_t>());
  }
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override {
    if (hooks_->backward_p2) units.push_back({this, &saved});
  }

 private:
  std::shared_ptr<Hooks> hooks_;
};

inline std::shared_ptr<Hooks> insert_probe(ModelSpec& model, int before) {
  auto hooks = std::make_shared<Hooks>();
  model.layers.insert(model.layers.begin() + before,
                      {concat("probe before ", before), "probe", [hooks] { return std::make_unique<Probe>(hooks); }});
  return hooks;
}

// All costs are zero. No op needs room, and the test gives the split.
inline Profile no_costs(const ModelSpec& model) {
  Profile profile;
  for (const LayerSpec& layer : model.layers) profile[layer.kind] = {};
  return profile;
}

inline PipelineOptions options_of(const std::vector<int>& split, const std::vector<int>& rank_of_stage = {}) {
  PipelineOptions options;
  options.stages = static_cast<int>(split.size());
  options.split = split;
  options.rank_of_stage = rank_of_stage;
  options.threads.pin = false;  // tests run beside each other
  options.timeout = kTimeout;
  options.seed = 3;
  return options;
}

// An update that calls back, and never takes a step back.
inline std::shared_ptr<StepUpdate> update_by(std::function<std::vector<Waited>(int rank)> run) {
  class Calls : public StepUpdate {
   public:
    explicit Calls(std::function<std::vector<Waited>(int)> run) : run_(std::move(run)) {}
    void apply(int, const std::vector<Parameter*>&) override { ADD_FAILURE() << "no stage streams its gradients"; }
    std::vector<Waited> run(int rank) override { return run_(rank); }
    Settled settle(int) override { return {}; }

   private:
    std::function<std::vector<Waited>(int)> run_;
  };
  return std::make_shared<Calls>(std::move(run));
}

inline StepRequest step_request() {
  StepRequest options;
  options.step = 5;
  options.loss.weight = 0.01;
  return options;
}

// Adds communication to F and B of a handmade schedule, as the executor needs it.
inline Schedule finished(Schedule schedule, P2Policy policy) {
  schedule = add_communication(apply_p2_policy(std::move(schedule), policy));
  validate(schedule);
  return schedule;
}

// Returns copies of all gradients in model order. The pipeline starts the next step without gradients.
inline std::vector<at::Tensor> take_gradients(Pipeline& pipeline) {
  std::vector<at::Tensor> gradients;
  for (int s = 0; s < pipeline.stages(); ++s) {
    for (int i = 0; i < pipeline.stage(s).layer_count(); ++i) {
      for (Parameter* parameter : pipeline.stage(s).parameters(i)) {
        if (!parameter->trainable()) continue;
        EXPECT_TRUE(parameter->has_grad()) << parameter->name();
        gradients.push_back(parameter->grad.clone());
        parameter->forget_grad();
      }
    }
  }
  return gradients;
}

inline void expect_same_bits(const std::vector<at::Tensor>& expected, const std::vector<at::Tensor>& actual) {
  ASSERT_EQ(expected.size(), actual.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(expected[i].sizes(), actual[i].sizes());
    EXPECT_EQ(std::memcmp(expected[i].const_data_ptr(), actual[i].const_data_ptr(), expected[i].nbytes()), 0)
        << "parameter " << i;
  }
}

}  // namespace twobp::test
