// Torch modules as layers of the pipeline. Their gradients must equal those of autograd on one device, and the bits
// must be the same for all stages, schedules and policies.
#include "twobp/autograd/autograd_layer.h"

#include <filesystem>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/train/helpers.h"
#include "tests/train/training.h"
#include "twobp/nn/layers/squared_error.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/stage.h"

namespace twobp::TWOBP_FILE {
namespace {

constexpr int64_t kDim = 6;

torch::nn::Sequential make_module(uint64_t seed) {
  torch::manual_seed(seed);
  return torch::nn::Sequential(torch::nn::Linear(kDim, 9), torch::nn::GELU(), torch::nn::Linear(9, kDim));
}

ModelSpec make_model() {
  ModelSpec model;
  model.input_field = "input";
  for (int i = 0; i < 3; ++i) {
    const std::string name = concat("block", i);
    model.layers.push_back(
        {name, "module", [name, module = make_module(10 + i)] { return from_module(module, name); }});
  }
  model.layers.push_back({"loss", "loss", [] { return std::make_unique<SquaredError>(); }});
  return model;
}

Fields micro_batch(uint64_t seed) {
  torch::manual_seed(seed);
  return {{"input", torch::randn({2, kDim})}, {"target", torch::randn({2, kDim})}};
}

// Gradients by name after one step with three micro-batches.
std::map<std::string, at::Tensor> gradients(int stages, const std::string& schedule, P2Policy policy) {
  const std::vector<Fields> batches = {micro_batch(1), micro_batch(2), micro_batch(3)};
  const ModelSpec model = make_model();
  PipelineOptions options;
  options.stages = stages;
  options.threads.pin = false;
  options.timeout = 60;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  Pipeline pipeline(model, measure_profile(model, batches[0], 0), options);
  StepRequest step;
  step.loss.weight = 1.0 / 6;
  const StepReport report = pipeline.run(pipeline.plan(schedule, 3, policy), batches, step);
  std::map<std::string, at::Tensor> grads;
  for (int s = 0; s < stages; ++s) {
    for (int i = 0; i < pipeline.stage(s).layer_count(); ++i) {
      for (const Parameter* p : pipeline.stage(s).parameters(i)) grads[p->name()] = p->grad.clone();
    }
  }
  grads["loss"] = torch::tensor(report.loss);
  return grads;
}

TEST(AutogradLayer, AgreesWithAutogradOnOneDevice) {
  const auto actual = gradients(1, "gpipe", P2Policy::kOff);
  std::vector<torch::nn::Sequential> blocks;
  for (int i = 0; i < 3; ++i) blocks.push_back(make_module(10 + i));
  at::Tensor loss = torch::zeros({});
  for (int m = 1; m <= 3; ++m) {
    const Fields fields = micro_batch(m);
    at::Tensor x = fields.at("input");
    for (auto& block : blocks) x = block->forward(x);
    loss = loss + (x - fields.at("target")).square().sum() / (2 * kDim) / 6;
  }
  loss.backward();
  EXPECT_NEAR(actual.at("loss").item<double>(), loss.item<double>(), 1e-6 * loss.item<double>());
  for (int i = 0; i < 3; ++i) {
    for (const auto& item : blocks[i]->named_parameters()) {
      const at::Tensor expected = item.value().grad();
      const at::Tensor& grad = actual.at(concat("block", i, ".", item.key()));
      // Sums have at most 3 * 9 terms in each of three blocks.
      EXPECT_LE((grad - expected).abs().max().item<float>(), 100 * 6e-8 * expected.abs().max().item<float>())
          << item.key();
    }
  }
}

TEST(AutogradLayer, SameBitsForEveryStageCountScheduleAndPolicy) {
  const auto expected = gradients(1, "gpipe", P2Policy::kOff);
  for (const int stages : {1, 2, 4}) {
    for (const std::string schedule : {"naive", "gpipe", "1f1b"}) {
      for (const P2Policy policy : {P2Policy::kOff, P2Policy::kEnd, P2Policy::kFill}) {
        for (const auto& [name, grad] : gradients(stages, schedule, policy)) {
          EXPECT_TRUE(at::equal(grad, expected.at(name))) << name << " " << stages << " " << schedule;
        }
      }
    }
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
