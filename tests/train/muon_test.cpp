// Tests Muon against its formula in float64, and the choice of the matrices that it updates.
// tests/python/test_optimizers.py compares whole runs with torch.optim.Muon.
#include <cmath>
#include <functional>
#include <map>
#include <memory>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <gtest/gtest.h>

#include "tests/train/helpers.h"
#include "tests/train/training.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/train/update/optimizer.h"
#include "twobp/train/update/update.h"

namespace twobp::TWOBP_FILE {
namespace {

at::Tensor random_matrix(int64_t rows, int64_t cols, uint64_t seed) {
  return at::randn({rows, cols}, at::make_generator<at::CPUGeneratorImpl>(seed), at::kDouble);
}

// Computes the result through the polynomial in the singular values, for one matrix of any shape.
at::Tensor orthogonal_by_svd(const at::Tensor& matrix) {
  auto [u, s, v] = at::linalg_svd(matrix, /*full_matrices=*/false);
  s = s / s.square().sum().sqrt();
  for (int i = 0; i < 5; ++i) s = 3.4445 * s - 4.7750 * s.pow(3) + 2.0315 * s.pow(5);
  return u.mm(at::diag(s)).mm(v);
}

double error_of(const at::Tensor& matrix, at::ScalarType type) {
  const at::Tensor expected = orthogonal_by_svd(matrix);
  const at::Tensor input = matrix.to(type == at::kDouble ? at::kDouble : at::kFloat).unsqueeze(0);
  const at::Tensor actual = orthogonalized(input.clone(), type)[0].to(at::kDouble);
  return ((actual - expected).norm() / expected.norm()).item<double>();
}

// The matrices are square and wide. They have one block of rows or several, and the last block may be smaller.
TEST(Orthogonalized, IsThePolynomialOfTheSingularValues) {
  for (const auto& [rows, cols] :
       {std::pair<int64_t, int64_t>{8, 8}, {5, 19}, {1, 7}, {3, 3}, {300, 310}, {260, 530}}) {
    const at::Tensor matrix = random_matrix(rows, cols, 1);
    EXPECT_LT(error_of(matrix, at::kDouble), 1e-11) << rows << " x " << cols;
    // Each of the five iterations may magnify the rounding by 3.4.
    EXPECT_LT(error_of(matrix, at::kFloat), 5e-5) << rows << " x " << cols;
    EXPECT_LT(error_of(matrix, at::kBFloat16), 0.05) << rows << " x " << cols;
    const at::Tensor values = std::get<1>(at::linalg_svd(orthogonal_by_svd(matrix)));
    EXPECT_GT(values.min().item<double>(), 0.3) << rows << " x " << cols;
    EXPECT_LT(values.max().item<double>(), 1.3) << rows << " x " << cols;
  }
  EXPECT_TRUE(orthogonalized(at::zeros({1, 3, 4}), at::kFloat).equal(at::zeros({1, 3, 4}))) << "no gradient, no step";
}

// A gradient of few samples has few singular values that are not rounding. Iterations of X X^T alone would magnify that
// rounding to 1e-3 here.
TEST(Orthogonalized, KeepsMatricesOfLowRank) {
  const auto orthogonal = [](int64_t rows, int64_t cols, uint64_t seed) {
    return std::get<0>(at::linalg_qr(random_matrix(rows, cols, seed)));
  };
  for (const int64_t columns : {300, 700}) {
    const at::Tensor falling = at::logspace(0, -8, 300, 10, at::kDouble);
    const at::Tensor matrix = orthogonal(300, 300, 1).mm(at::diag(falling)).mm(orthogonal(columns, 300, 2).t());
    EXPECT_LT(error_of(matrix.to(at::kFloat).to(at::kDouble), at::kFloat), 5e-5) << columns;
  }
}

// There are a packed weight of a square and a wide part, and tall ones of one shape. The step has clipping and weight
// decay.
TEST(Muon, TakesTheStepOfTheFormula) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  OptimizerConfig config;
  config.type = "muon";
  config.weight_decay = 0.1;
  config.muon_momentum = 0.9;
  config.groups = {"tall lr_scale=0.5"};
  constexpr double kFactor = 0.25;
  Parameter packed({{"q", 6}, {"k", 4}}, {10, 6}, at::kDouble, 1.0);
  Parameter tall({{"tall", 9}}, {9, 5}, at::kDouble, 1.0);
  Parameter tall2({{"tall2", 9}}, {9, 5}, at::kDouble, 1.0);
  std::vector<Optimizer::Item> items;
  std::map<std::string, at::Tensor> value, momentum;
  for (Parameter* parameter : {&packed, &tall, &tall2}) {
    parameter->allocate_value(3);
    parameter->allocate_grad();
    items.push_back({parameter, 0, true});
    for (const auto& [name, rows] : parameter->parts_of(parameter->master)) {
      value[name] = rows.clone();
      momentum[name] = at::zeros_like(value[name]);
    }
  }
  Optimizer optimizer(config, items);
  for (uint64_t step = 0; step < 4; ++step) {
    const double lr = 0.1 / static_cast<double>(1 + step);
    for (Parameter* parameter : {&packed, &tall, &tall2}) {
      const at::Tensor grad = random_matrix(parameter->sizes()[0], parameter->sizes()[1], 10 + step);
      parameter->grad_to_add().copy_(grad);
      for (const auto& [name, rows] : parameter->parts_of(grad)) {
        const at::Tensor g = rows * kFactor;
        at::Tensor& m = momentum[name];
        m = 0.9 * m + 0.1 * g;
        const double scale = 0.2 * std::sqrt(static_cast<double>(std::max(rows.size(0), rows.size(1))));
        const double rate = name == "tall" ? lr / 2 : lr;
        value[name] = (1 - rate * 0.1) * value[name] - rate * scale * orthogonal_by_svd(0.1 * g + 0.9 * m);
      }
    }
    optimizer.step(lr, kFactor);
  }
  for (Parameter* parameter : {&packed, &tall, &tall2}) {
    for (const auto& [name, rows] : parameter->parts_of(parameter->master)) {
      EXPECT_LT((rows - value[name]).abs().max().item<double>(), 1e-12) << name;
    }
  }
}

// Weights of one name with several projections: of q, k and v as columns (GPT-2), or in each of three heads (GPT-NeoX),
// and a plain one below another. Each projection takes the step of a weight of its own.
TEST(Muon, TakesTheStepOfEachProjection) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  OptimizerConfig config;
  config.type = "muon";
  config.weight_decay = 0.1;
  const auto rows_of = [](const at::Tensor& w, int64_t heads, int64_t size, int64_t part) {
    std::vector<at::Tensor> rows;
    for (int64_t head = 0; head < heads; ++head) rows.push_back(w.narrow(0, (3 * head + part) * size, size));
    return at::cat(rows);
  };
  using Select = std::function<at::Tensor(const at::Tensor&, int64_t)>;
  const Select columns = [](const at::Tensor& w, int64_t part) {
    return part == 0 ? w.narrow(1, 0, 8) : w.narrow(1, 4 + 4 * part, 4);
  };
  const Select of_heads = [&](const at::Tensor& w, int64_t part) { return rows_of(w, 3, 2, part); };
  const Select stacked = [](const at::Tensor& w, int64_t part) { return w.narrow(0, 4 * part, 4); };
  Parameter by_columns({{"columns", 5, {{8, 4, 4}, 1, true}}}, {5, 16}, at::kDouble, 1.0);
  Parameter by_heads({{"heads", 18, {{6, 6, 6}, 3}}}, {18, 4}, at::kDouble, 1.0);
  Parameter below({{"both", 8, {{4, 4}}}, {"plain", 4}}, {12, 6}, at::kDouble, 1.0);
  for (const auto& [whole, select] :
       {std::pair<Parameter*, Select>{&by_columns, columns}, {&by_heads, of_heads}, {&below, stacked}}) {
    whole->allocate_value(3);
    whole->allocate_grad();
    const at::Tensor grad = random_matrix(whole->sizes()[0], whole->sizes()[1], 7);
    whole->grad_to_add().copy_(grad);
    std::vector<std::unique_ptr<Parameter>> parts;
    std::vector<Optimizer::Item> items;
    for (int64_t part = 0; part < 3; ++part) {
      const at::Tensor value = select(whole->master, part).contiguous();
      parts.push_back(std::make_unique<Parameter>(concat("part", part), value.clone()));
      parts.back()->allocate_value(0);
      parts.back()->allocate_grad();
      parts.back()->grad_to_add().copy_(select(grad, part));
      items.push_back({parts.back().get(), 0, true});
    }
    Optimizer(config, {{whole, 0, true}}).step(0.1, 1);
    Optimizer(config, items).step(0.1, 1);
    int64_t work = 0;
    for (int64_t part = 0; part < 3; ++part) {
      const Parameter& one = *parts[static_cast<size_t>(part)];
      EXPECT_LT((select(whole->master, part) - one.master).abs().max().item<double>(), 1e-12)
          << whole->name() << ' ' << part;
      work += muon_work(one);
    }
    EXPECT_EQ(muon_work(*whole), work) << whole->name();
  }
}

Config muon_config() {
  Config config = test::tiny_config();
  config.optimizer.type = "muon";
  return config;
}

// Returns the names of the parts whose state is Muon's, on all ranks.
std::vector<std::string> by_muon(const Config& config) {
  Trainer trainer(config);
  std::vector<std::string> names;
  for (const LiveTensor& one : trainer.update().live_optimizer_state()) {
    const size_t end = one.name.rfind(".momentum");
    if (end != std::string::npos) names.push_back(one.name.substr(0, end));
  }
  return names;
}

TEST(Muon, TakesTheMatricesOfHiddenLayers) {
  for (const bool tied : {false, true}) {
    for (const int stages : {1, 3}) {
      Config config = muon_config();
      test::llama_of(config).layers = 1;
      test::llama_of(config).tied = tied;
      config.pipeline.stages = stages;
      const std::string block = "model.layers.0.";
      std::vector<std::string> expected;
      for (const char* name : {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                               "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"})
        expected.push_back(concat(block, name, ".weight"));
      EXPECT_EQ(by_muon(config), expected);
      config.optimizer.groups = {"*_proj.* rule=adamw", "*down_proj* rule=muon"};
      EXPECT_EQ(by_muon(config), std::vector<std::string>{block + "mlp.down_proj.weight"});
    }
  }
}

TEST(Muon, TakesNoEncoderEmbedding) {
  Config config = load_config(
      "", {"model.type=bert", "data.synthetic=tokens", "data.held_out=0", "model.dim=16", "model.heads=2",
           "model.layers=1", "model.vocab=64", "optimizer.type=muon", "pipeline.pin=false", "pipeline.stages=1"});
  for (const std::string& name : by_muon(config)) EXPECT_EQ(name.find("embeddings"), std::string::npos) << name;
  EXPECT_FALSE(by_muon(config).empty());
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
