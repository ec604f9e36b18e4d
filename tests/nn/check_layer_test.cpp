// The gradient check that users run on their own layers finds typical mistakes. gradient_test.cpp shows that right
// layers pass.
#include "twobp/nn/check_layer.h"

#include <functional>

#include "tests/nn/layer_test_util.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_error;

enum class Mistake { kNone, kP1, kP2, kNoW, kNoUnit, kOverwrites, kState, kShape, kThrows };

// Computes y = x w^T + b, with one mistake.
class Mistaken : public Layer {
 public:
  explicit Mistaken(Mistake mistake, at::ScalarType dtype = at::kDouble)
      : mistake_(mistake), weight_({{"w", 3}}, {3, 4}, dtype, 0.5), bias_({{"b", 3}}, {3}, dtype, 0) {}

  Values forward(Values x, Context& context, Saved& saved) override {
    if (context.keeps()) saved.keep_until_p2(x[0]);
    last_ = x[0];
    return {at::addmm(bias_.value, x[0], weight_.value.t())};
  }
  Values backward_p1(Values dy, Context&, Saved& saved) override {
    saved.keep_until_p2(dy[0]);
    bias_.accumulate(dy[0].sum(0));
    if (mistake_ == Mistake::kThrows) at::mm(dy[0], dy[0]);
    at::Tensor dx = at::mm(dy[0], weight_.value);
    if (mistake_ == Mistake::kP1) dx[1][2].add_(1e-3);
    if (mistake_ == Mistake::kShape) dx = dx.t();
    return {dx};
  }
  void backward_p2(std::span<Saved* const> saved) override {
    if (mistake_ == Mistake::kNoW) return;
    for (const Saved* one : saved) {
      at::Tensor dw = at::mm(one->p2(1).t(), mistake_ == Mistake::kState ? last_ : one->p2(0));
      if (mistake_ == Mistake::kP2) dw[2][3].mul_(-1);
      if (mistake_ == Mistake::kOverwrites) weight_.forget_grad();
      weight_.accumulate(dw);
    }
  }
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override {
    if (mistake_ != Mistake::kNoUnit) units.push_back({this, &saved});
  }
  void collect_parameters(std::vector<Parameter*>& parameters) override {
    parameters.insert(parameters.end(), {&weight_, &bias_});
  }

 private:
  Mistake mistake_;
  Parameter weight_, bias_;
  at::Tensor last_;
};

void check(Mistake mistake) {
  Mistaken layer(mistake);
  check_layer(layer, {test::random({2, 4}, 5)});
}

TEST(CheckLayer, PassesALayerWithoutMistake) {
  check(Mistake::kNone);
}

TEST(CheckLayer, FindsMistakes) {
  expect_error([] { check(Mistake::kP1); }, {"dL/dx of input 0, element 6, is ", "finite differences give "});
  expect_error([] { check(Mistake::kShape); }, {"dL/dx of input 0 has the sizes [4, 2], not [2, 4]"});
  expect_error([] { check(Mistake::kThrows); }, {"the layer fails: mat1 and mat2 shapes cannot be multiplied"});
  expect_error([] { check(Mistake::kP2); }, {"the gradient of parameter w, element 11, is "});
  expect_error([] { check(Mistake::kNoW); }, {"parameter w got no gradient", "backward_p2"});
  expect_error([] { check(Mistake::kNoUnit); }, {"parameter w got no gradient", "collect_p2"});
  expect_error([] { check(Mistake::kOverwrites); }, {"the gradient of parameter w", "two micro-batches"});
  expect_error([] { check(Mistake::kState); }, {"the gradient of parameter w", "keep nothing in the layer"});
}

TEST(CheckLayer, NeedsFloat64) {
  Mistaken layer(Mistake::kNone, at::kFloat);
  expect_error([&] { check_layer(layer, {test::random({2, 4}, 5)}); }, {"parameter w is Float", "float64"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
