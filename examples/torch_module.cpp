// A model of torch::nn modules in the pipeline, without a split layer written for it. Its I and W come from autograd,
// and have autograd's cost.
#include <cstdio>

#include <torch/torch.h>

#include "twobp/autograd/autograd_layer.h"
#include "twobp/nn/layers/squared_error.h"
#include "twobp/twobp.h"

namespace {

constexpr int64_t kDim = 16;

// Each sample is random numbers, with their running sum as target.
class RunningSums : public twobp::Dataset {
 public:
  int64_t size() const override { return 1024; }
  twobp::Fields read(const std::vector<int64_t>& indices, int64_t /*epoch*/) const override {
    std::vector<at::Tensor> rows;
    for (const int64_t index : indices) {
      rows.push_back(at::sin(at::arange(1, kDim + 1) * static_cast<double>(index + 1) * 0.61803));
    }
    const at::Tensor x = at::stack(rows);
    return {{"input", x}, {"target", x.cumsum(1)}};
  }
};

torch::nn::Sequential make_block() {
  return torch::nn::Sequential(torch::nn::Linear(kDim, 64), torch::nn::Tanh(), torch::nn::Linear(64, kDim));
}

}  // namespace

int main() {
  torch::manual_seed(1);
  twobp::ModelSpec model;
  model.input_field = "input";
  for (int i = 0; i < 4; ++i) {
    const std::string name = "block" + std::to_string(i);
    model.layers.push_back({name, "block", [name, block = make_block()] { return twobp::from_module(block, name); }});
  }
  model.layers.push_back({"loss", "loss", [] { return std::make_unique<twobp::SquaredError>(); }});

  twobp::Config config;
  config.pipeline.stages = 2;
  config.pipeline.micro_batches = 4;
  config.pipeline.micro_batch_size = 16;
  config.optimizer.lr = 3e-3;
  config.train.steps = 150;
  twobp::Trainer trainer(config, model, {std::make_shared<RunningSums>(), nullptr});
  const double first = trainer.step().loss;
  double last = first;
  while (trainer.steps_done() < config.train.steps) last = trainer.step().loss;
  std::printf("loss %.4f -> %.4f\n", first, last);
  return last < 0.5 * first ? 0 : 1;
}
