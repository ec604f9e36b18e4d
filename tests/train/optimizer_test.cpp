// Tests AdamW, Adam and SGD against their formulas in float64, step by step: the weight decay of each parameter, the
// meaning of a missing gradient, and the factor of clipping.
//
// The kernels compute in float32. An update has fewer than 20 operations. So after 6 steps of at most lr = 0.1 on
// weights of size 3, the error is at most 6 * (20 * 6e-8 * 0.1 + 6e-8 * 3) < 2e-6.
#include "twobp/train/update/optimizer.h"

#include <cmath>

#include <gtest/gtest.h>

#include "tests/train/helpers.h"

namespace twobp::TWOBP_FILE {
namespace {

constexpr double kBound = 2e-6;
constexpr int kSteps = 6;

// These are the formulas for one number. AdamW (Loshchilov, Hutter 2019) shrinks the weight by lr * decay first. Adam
// and SGD add decay * weight to the gradient.
class Formula {
 public:
  Formula(OptimizerConfig config, double weight, double decay)
      : config_(std::move(config)), weight_(weight), decay_(decay) {}

  void step(double gradient, double lr) {
    ++steps_;
    if (config_.type == "sgd") {
      const double g = gradient + decay_ * weight_;
      first_ = steps_ == 1 ? g : config_.momentum * first_ + g;
      weight_ -= lr * (config_.momentum > 0 ? first_ : g);
      return;
    }
    double g = gradient;
    if (config_.type == "adamw") weight_ -= lr * decay_ * weight_;
    if (config_.type == "adam") g += decay_ * weight_;
    first_ = config_.beta1 * first_ + (1 - config_.beta1) * g;
    second_ = config_.beta2 * second_ + (1 - config_.beta2) * g * g;
    const double m = first_ / (1 - std::pow(config_.beta1, steps_));
    const double v = second_ / (1 - std::pow(config_.beta2, steps_));
    weight_ -= lr * m / (std::sqrt(v) + config_.eps);
  }
  double weight() const { return weight_; }

 private:
  OptimizerConfig config_;
  double weight_;
  double decay_;
  double first_ = 0;
  double second_ = 0;
  int steps_ = 0;
};

OptimizerConfig config_of(const std::string& type, double momentum = 0) {
  OptimizerConfig config;
  config.type = type;
  config.momentum = momentum;
  config.weight_decay = 0.1;
  config.beta1 = 0.8;
  config.beta2 = 0.95;
  config.eps = 1e-3;
  return config;
}

double gradient_at(int step, int64_t i) {
  return std::sin(3.0 * step + static_cast<double>(i)) * (i % 3 == 0 ? 0.01 : 1);
}
double lr_at(int step) {
  return 0.1 / (1 + step);
}

// These are the weight decay and the scale of the learning rate.
struct Expected {
  double decay, lr_scale;
};

// Compares the update of a matrix and of a vector with the formula.
void expect_formula(const OptimizerConfig& config, double factor, Expected of_matrix = {0.1, 1},
                    Expected of_gain = {0, 1}) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  Parameter matrix({{"matrix", 5}}, {5, 7}, at::kFloat, 1.0);
  Parameter gain({{"gain", 6}}, {6}, at::kFloat, 0, 1);
  Parameter* parameters[] = {&matrix, &gain};
  std::vector<std::vector<Formula>> expected;
  std::vector<Optimizer::Item> items;
  for (Parameter* parameter : parameters) {
    parameter->allocate_value(3);
    parameter->allocate_grad();
    items.push_back({parameter, 0});
    auto& formulas = expected.emplace_back();
    for (int64_t i = 0; i < parameter->numel(); ++i) {
      formulas.emplace_back(config, parameter->value.view({-1})[i].item<double>(),
                            (parameter == &matrix ? of_matrix : of_gain).decay);
    }
  }
  Optimizer optimizer(config, items);
  for (int step = 0; step < kSteps; ++step) {
    for (size_t p = 0; p < 2; ++p) {
      // In step 2, the vector has no gradient, which counts as 0.
      const bool missing = step == 2 && p == 1;
      for (int64_t i = 0; i < parameters[p]->numel(); ++i) {
        const double gradient = missing ? 0 : gradient_at(step, i);
        if (!missing) parameters[p]->grad_to_add().view({-1})[i] = gradient / factor;
        expected[p][i].step(static_cast<float>(gradient / factor) * factor,
                            lr_at(step) * (p == 0 ? of_matrix : of_gain).lr_scale);
      }
    }
    optimizer.step(lr_at(step), factor);
    EXPECT_FALSE(matrix.has_grad()) << "a step uses the gradient up";
    EXPECT_FALSE(gain.has_grad());
  }
  for (size_t p = 0; p < 2; ++p) {
    for (int64_t i = 0; i < parameters[p]->numel(); ++i) {
      EXPECT_NEAR(parameters[p]->value.view({-1})[i].item<double>(), expected[p][i].weight(), kBound)
          << config.type << ", " << parameters[p]->name() << " " << i;
    }
  }
}

TEST(Optimizer, AdamWFollowsItsFormula) {
  expect_formula(config_of("adamw"), 1);
}
TEST(Optimizer, AdamFollowsItsFormula) {
  expect_formula(config_of("adam"), 1);
}
TEST(Optimizer, SgdFollowsItsFormula) {
  expect_formula(config_of("sgd"), 1);
}
TEST(Optimizer, SgdWithMomentumFollowsItsFormula) {
  expect_formula(config_of("sgd", 0.9), 1);
}

// The factor of clipping multiplies the gradient before any other use.
TEST(Optimizer, AppliesTheFactorOfClipping) {
  for (const char* type : {"adamw", "adam", "sgd"}) expect_formula(config_of(type, 0.5), 0.25);
}

TEST(Optimizer, AppliesGroupsByName) {
  for (const char* type : {"adamw", "sgd"}) {
    OptimizerConfig config = config_of(type);
    config.groups = {"* weight_decay=0.4", "mat??x weight_decay=0.3", "gain weight_decay=0.05"};
    expect_formula(config, 1, {0.3, 1}, {0.05, 1});
    config.groups = {"matrix weight_decay=0 lr_scale=0.5", "gain  lr_scale=0"};
    expect_formula(config, 1, {0, 0.5}, {0, 0});
  }
}

TEST(Optimizer, RefusesBadGroups) {
  OptimizerConfig config;
  const std::pair<const char*, const char*> wrong[] = {
      {"gain", "says nothing"},        {"", "pattern"},
      {"weight_decay=0", "pattern"},   {"gain weight_decay=", "number"},
      {"gain lr_scale=-1", "number"},  {"gain lr_scale=0.1x", "number"},
      {"gain lr_scale=nan", "number"}, {"gain lr=0.1", "lr_scale"},
      {"gain rule=muon", "\"muon\""},  {"gain weight_decay", "number"},
  };
  for (const auto& [text, why] : wrong) {
    config.groups = {text};
    test::expect_error([&] { ParameterGroups groups(config); }, {"optimizer.groups", text, why, "*.bias"});
  }
  config.groups = {"gian weight_decay=0"};
  test::expect_error([&] { ParameterGroups(config).check({"matrix", "gain"}); }, {"gian", "did you mean \"gain\""});
  config.groups = {"q lr_scale=0"};
  const Parameter packed({{"q", 2}, {"k", 2}}, {4, 3}, at::kFloat, 1.0);
  test::expect_error([&] { ParameterGroups(config).rule_of(packed, true); }, {"stored as one weight"});
  config.type = "muon";
  config.groups = {"gain rule=sgd"};
  test::expect_error([&] { ParameterGroups groups(config); }, {"rule other than"});
  config.groups = {"gain rule=muon"};
  const Parameter gain({{"gain", 2}}, {2}, at::kFloat, 1.0);
  test::expect_error([&] { ParameterGroups(config).rule_of(gain, false); },
                     {"gain", "1 dimensions", "leave it to adamw"});
}

TEST(Optimizer, RefusesAnUnknownType) {
  test::expect_error([] { Optimizer(config_of("adamm"), {}); }, {"adamm"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
