// A custom layer with a split backward pass among the library's layers: y = relu(x W^T + b). p1 gives dL/dx. p2 adds
// dL/dW and dL/db, for which no other rank waits. See docs/add_a_layer.md.
#include <cmath>
#include <cstdio>

#include "twobp/nn/layer.h"
#include "twobp/nn/layers/linear.h"
#include "twobp/nn/layers/squared_error.h"
#include "twobp/twobp.h"

namespace {

class ReluLinear : public twobp::Layer {
 public:
  ReluLinear(const std::string& name, int64_t in, int64_t out, at::ScalarType dtype = at::kFloat)
      : weight_({{name + ".weight", out}}, {out, in}, dtype, /*std=*/std::sqrt(2.0 / in)),
        bias_({{name + ".bias", out}}, {out}, dtype, /*std=*/0, /*fill=*/0) {}

  twobp::Values forward(twobp::Values x, twobp::Context& context, twobp::Saved& saved) override {
    at::Tensor y = at::relu(at::addmm(bias_.value, x[0], weight_.value.t()));
    if (context.keeps()) {
      saved.keep_until_p2(x[0]);
      saved.keep_until_p1(y);
    }
    return {y};
  }

  twobp::Values backward_p1(twobp::Values dy, twobp::Context&, twobp::Saved& saved) override {
    saved.keep_until_p2(dy[0] * (saved.take_p1(0) > 0));
    return {at::mm(saved.p2(1), weight_.value)};
  }

  void backward_p2(std::span<twobp::Saved* const> saved) override {
    for (twobp::Saved* one : saved) {
      weight_.accumulate_product(one->p2(1).t(), one->p2(0));
      bias_.grad_to_add().add_(one->p2(1).sum(0));
    }
  }

  void collect_p2(twobp::Saved& saved, std::vector<twobp::P2Unit>& units) override { units.push_back({this, &saved}); }
  void collect_parameters(std::vector<twobp::Parameter*>& parameters) override {
    parameters.insert(parameters.end(), {&weight_, &bias_});
  }

 private:
  twobp::Parameter weight_, bias_;
};

// x in the unit square, target sin(3 x0) x1 in each of two outputs.
class Points : public twobp::Dataset {
 public:
  int64_t size() const override { return 512; }
  twobp::Fields read(const std::vector<int64_t>& indices, int64_t /*epoch*/) const override {
    at::Tensor x = at::empty({static_cast<int64_t>(indices.size()), 2});
    for (size_t i = 0; i < indices.size(); ++i) {
      x[static_cast<int64_t>(i)][0] = std::fmod(0.7548776662 * static_cast<double>(indices[i]), 1.0);
      x[static_cast<int64_t>(i)][1] = std::fmod(0.5698402910 * static_cast<double>(indices[i]), 1.0);
    }
    const at::Tensor y = at::sin(3 * x.select(1, 0)) * x.select(1, 1);
    return {{"input", x}, {"target", at::stack({y, y}, 1)}};
  }
};

}  // namespace

int main() {
  ReluLinear layer("checked", 3, 4, at::kDouble);
  twobp::check_layer(layer, {at::rand({5, 3}, at::kDouble)});  // throws Error if p1 or p2 is wrong

  twobp::ModelSpec model;
  model.input_field = "input";
  const std::vector<int64_t> widths = {2, 64, 64};
  for (size_t i = 0; i + 1 < widths.size(); ++i) {
    const std::string name = "layer" + std::to_string(i);
    model.layers.push_back({name, name, [=] { return std::make_unique<ReluLinear>(name, widths[i], widths[i + 1]); }});
  }
  model.layers.push_back({"out", "out", [] {
                            const std::vector<twobp::ParameterPart> weight = {{"out.weight", 2}};
                            return twobp::make_sequential(
                                std::make_unique<twobp::Linear>(weight, 64, /*init_std=*/0.1, at::kFloat),
                                std::make_unique<twobp::SquaredError>());
                          }});

  twobp::Config config;
  config.pipeline.stages = 2;
  config.pipeline.micro_batches = 4;
  config.pipeline.micro_batch_size = 16;
  config.optimizer.lr = 3e-3;
  config.train.steps = 100;
  twobp::Trainer trainer(config, model, {std::make_shared<Points>(), nullptr});
  const double first = trainer.step().loss;
  double last = first;
  while (trainer.steps_done() < config.train.steps) last = trainer.step().loss;
  std::printf("loss %.4f -> %.4f\n", first, last);
  return last < 0.1 * first ? 0 : 1;
}
