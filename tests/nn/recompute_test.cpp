// Tests layers that recompute tensors instead of keeping them. For every layer and mode, the bits must equal those of
// the layer itself, nothing may be updated twice, and only the tensors that the mode promises may be kept.
#include <map>

#include "tests/nn/layer_cases.h"
#include "twobp/models/decoder/family.h"
#include "twobp/models/recompute/recompute_layer.h"
#include "twobp/models/recompute/recompute_rules.h"
#include "twobp/nn/layer.h"
#include "twobp/nn/layers/batch_norm.h"
#include "twobp/nn/layers/linear.h"
#include "twobp/nn/layers/norms.h"
#include "twobp/nn/layers/residual.h"

namespace twobp::TWOBP_FILE {
namespace {

using namespace test;

constexpr std::array<Recompute, 3> kModes = {Recompute::kActivations, Recompute::kDerivatives, Recompute::kBoth};

struct Result {
  std::vector<at::Tensor> y, dx, dw, buffers;
};

// Three micro-batches pass through the layer at once. The W of each follows the I of the next one.
Result run(const LayerCase& c, Layer& layer, at::ScalarType dtype) {
  const std::vector<Parameter*> parameters = make_parameters(layer);
  Result result;
  std::vector<std::unique_ptr<MicroBatch>> micro_batches;
  for (int m = 0; m < 3; ++m) {
    micro_batches.push_back(c.micro_batch(layer, 2, 10 + m, dtype, m));
    result.y.push_back(micro_batches[m]->forward(c.make_input(2, 20 + m, dtype)).clone());
  }
  const auto p1 = [&](int m) {
    const at::Tensor dx = micro_batches[m]->p1(c.make_gradient(result.y[m], 30 + m));
    result.dx.push_back(dx.defined() ? dx.clone() : dx);
    micro_batches[m]->saved.release_p1();
  };
  p1(0);
  p1(1);
  micro_batches[0]->p2();
  p1(2);
  micro_batches[1]->p2();
  micro_batches[2]->p2();
  for (const Parameter* parameter : parameters_of(layer)) {
    if (parameter->is_buffer()) result.buffers.push_back(parameter->value.clone());
  }
  result.dw = copy_grads(parameters);
  return result;
}

void expect_same(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected, const char* what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(same_bits(actual[i], expected[i])) << what << ' ' << i;
  }
}

TEST_P(EveryLayer, RecomputedGivesTheSameBits) {
  const LayerCase& c = GetParam();
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const Result expected = run(c, *c.make(dtype), dtype);
    for (const Recompute mode : kModes) {
      SCOPED_TRACE(concat(recompute_name(mode), ", ", c10::toString(dtype)));
      RecomputeLayer layer(c.make(dtype), mode);
      const Result actual = run(c, layer, dtype);
      expect_same(actual.y, expected.y, "y");
      expect_same(actual.dx, expected.dx, "dx");
      expect_same(actual.dw, expected.dw, "dw");
      expect_same(actual.buffers, expected.buffers, "buffer");
    }
  }
}

// Evaluation keeps nothing and equals that of the layer.
TEST_P(EveryLayer, RecomputedEvaluatesAsTheLayerDoes) {
  const LayerCase& c = GetParam();
  const auto plain = c.make(at::kFloat);
  make_parameters(*plain);
  const at::Tensor expected = c.micro_batch(*plain, 2, 10, at::kFloat)->evaluate(c.make_input(2, 20, at::kFloat));
  for (const Recompute mode : kModes) {
    RecomputeLayer layer(c.make(at::kFloat), mode);
    make_parameters(layer);
    const auto micro_batch = c.micro_batch(layer, 2, 10, at::kFloat);
    EXPECT_TRUE(same_bits(micro_batch->evaluate(c.make_input(2, 20, at::kFloat)), expected))
        << c.name << ", " << recompute_name(mode);
  }
}

constexpr int64_t kRows = 12;
constexpr int64_t kDim = 6;
constexpr int64_t kHidden = 10;
constexpr int64_t kFloat = 4;

// x + down(up(norm(x))). F keeps norm(x), 1 / rms, x and up(norm(x)). I keeps two inputs and two gradients.
std::unique_ptr<Layer> branch() {
  return std::make_unique<Residual>(make_sequential(
      std::make_unique<RmsNorm>("norm", kDim, 1e-5, at::kFloat),
      std::make_unique<Linear>(std::vector<ParameterPart>{{"up.weight", kHidden}}, kDim, 0.3, at::kFloat),
      std::make_unique<Linear>(std::vector<ParameterPart>{{"down.weight", kDim}}, kHidden, 0.3, at::kFloat)));
}

struct Held {
  int64_t after_forward = 0;
  int64_t after_p1 = 0;
  int64_t after_p2 = 0;
};

// The bytes of the saved tensors, without outputs and gradients.
Held held_by(Layer& layer) {
  const auto parameters = make_parameters(layer);
  MicroBatch micro_batch(layer);
  const LiveBytes live;
  Held held;
  at::Tensor y = micro_batch.forward(random({kRows, kDim}, 1, at::kFloat));
  y.reset();
  held.after_forward = live.now();
  at::Tensor dx = micro_batch.p1(random({kRows, kDim}, 2, at::kFloat));
  dx.reset();
  micro_batch.saved.release_p1();
  held.after_p1 = live.now();
  micro_batch.p2();
  held.after_p2 = live.now();
  return held;
}

TEST(Recompute, KeepsTheTensorsOfTheMode) {
  constexpr int64_t kInput = kRows * kDim * kFloat;
  constexpr int64_t kInner = kRows * kHidden * kFloat;
  constexpr int64_t kForward = 2 * kInput + kRows * kFloat + kInner;  // x, norm(x), 1 / rms, up(norm(x))
  constexpr int64_t kStash = 2 * kInput + 2 * kInner;
  const std::map<Recompute, Held> expected = {{Recompute::kNone, {kForward, kStash, 0}},
                                              {Recompute::kActivations, {kInput, kStash, 0}},
                                              {Recompute::kDerivatives, {kForward, 2 * kInput, 0}},
                                              {Recompute::kBoth, {kInput, 2 * kInput, 0}}};
  for (const auto& [mode, bytes] : expected) {
    RecomputeLayer layer(branch(), mode);
    const Held held = held_by(layer);
    EXPECT_EQ(held.after_forward, bytes.after_forward) << recompute_name(mode);
    EXPECT_EQ(held.after_p1, bytes.after_p1) << recompute_name(mode);
    EXPECT_EQ(held.after_p2, bytes.after_p2) << recompute_name(mode);
  }
}

// Tensors that the caller still holds are read again later, so they must not be overwritten.
TEST(Recompute, LeavesTheCallersTensorsAlone) {
  for (const Recompute mode : kModes) {
    RecomputeLayer layer(branch(), mode);
    make_parameters(layer);
    MicroBatch micro_batch(layer);
    const at::Tensor x = random({kRows, kDim}, 1, at::kFloat);
    const at::Tensor dy = random({kRows, kDim}, 2, at::kFloat);
    micro_batch.forward(x);
    micro_batch.p1(dy);
    micro_batch.p2();
    EXPECT_TRUE(same_bits(x, random({kRows, kDim}, 1, at::kFloat))) << recompute_name(mode);
    EXPECT_TRUE(same_bits(dy, random({kRows, kDim}, 2, at::kFloat))) << recompute_name(mode);
  }
}

// There is one unit if derivatives are recomputed, and otherwise the layer's own units. Without W, there is none.
TEST(Recompute, UnitsOfBackwardP2) {
  const std::map<Recompute, size_t> expected = {
      {Recompute::kNone, 2}, {Recompute::kActivations, 2}, {Recompute::kDerivatives, 1}, {Recompute::kBoth, 1}};
  for (const auto& [mode, units] : expected) {
    for (const bool frozen : {false, true}) {
      RecomputeLayer layer(branch(), mode);
      for (Parameter* parameter : make_parameters(layer)) {
        if (frozen) parameter->freeze();
      }
      MicroBatch micro_batch(layer);
      micro_batch.forward(random({kRows, kDim}, 1, at::kFloat));
      micro_batch.p1(random({kRows, kDim}, 2, at::kFloat));
      EXPECT_EQ(micro_batch.p2_units().size(), frozen ? 0 : units) << recompute_name(mode);
    }
  }
}

TEST(Recompute, BackwardWithoutForwardOrTwiceIsAnError) {
  for (const Recompute mode : kModes) {
    RecomputeLayer layer(branch(), mode);
    make_parameters(layer);
    const at::Tensor dy = random({kRows, kDim}, 2, at::kFloat);
    MicroBatch without(layer);
    expect_error([&] { without.p1(dy); }, {"it runs once after each forward", recompute_name(mode).data()});
    MicroBatch twice(layer);
    twice.forward(random({kRows, kDim}, 1, at::kFloat));
    twice.p1(dy);
    expect_error([&] { twice.p1(dy); }, {"it runs once after each forward"});
    if (mode == Recompute::kActivations) continue;
    MicroBatch early(layer);
    early.forward(random({kRows, kDim}, 1, at::kFloat));
    expect_error([&] { early.p2(); }, {"backward-p1"});
  }
}

// While gradients are discarded, contributions of every kind have no effect and existing gradients remain.
TEST(Recompute, DiscardedGradientsChangeNothing) {
  Parameter parameter({{"w", 2}}, {2, 3}, at::kFloat, 1);
  parameter.allocate_value(1);
  parameter.allocate_grad();
  const at::Tensor one = at::ones({2, 3});
  const auto contribute = [&] {
    parameter.accumulate(one);
    parameter.accumulate_product(at::ones({2, 4}), at::ones({4, 3}));
    parameter.grad_to_add().add_(one);
  };
  parameter.discard_gradients(true);
  contribute();
  EXPECT_FALSE(parameter.has_grad());
  parameter.discard_gradients(false);
  parameter.accumulate(one);
  parameter.discard_gradients(true);
  contribute();
  EXPECT_TRUE(same_bits(parameter.grad, one));
  parameter.discard_gradients(false);
  contribute();
  EXPECT_TRUE(same_bits(parameter.grad, 7 * one));
}

ModelSpec model() {
  DecoderOptions options;
  options.layers = 2;
  return llama(options);
}

std::vector<std::string> kinds_with(const std::vector<std::string>& rules, const std::vector<int>& split = {}) {
  ModelSpec of = model();
  std::vector<RecomputeRule> parsed;
  for (const std::string& rule : rules) parsed.push_back(parse_recompute_rule(rule));
  recompute(of, modes_by_layer(of, parsed, split));
  std::vector<std::string> kinds;
  for (const LayerSpec& spec : of.layers) kinds.push_back(spec.kind);
  return kinds;
}

TEST(RecomputeRules, SayWhichLayers) {
  using Kinds = std::vector<std::string>;
  EXPECT_EQ(kinds_with({}), (Kinds{"embedding", "attention", "mlp", "attention", "mlp", "head"}));
  EXPECT_EQ(kinds_with({"none"}), kinds_with({}));
  EXPECT_EQ(kinds_with({"both"}),
            (Kinds{"embedding", "attention+both", "mlp+both", "attention+both", "mlp+both", "head"}));
  EXPECT_EQ(kinds_with({"activations", "*.mlp=derivatives", "model.layers.1.*=none", "lm_head=activations"}),
            (Kinds{"embedding", "attention+activations", "mlp+derivatives", "attention", "mlp", "head+activations"}));
  EXPECT_EQ(kinds_with({"stage:0=activations", "stage:1=derivatives"}, {2, 4}),
            (Kinds{"embedding", "attention+activations", "mlp+derivatives", "attention+derivatives", "mlp+derivatives",
                   "head"}));
}

TEST(RecomputeRules, Errors) {
  expect_error([] { parse_recompute_rule("activation"); }, {"'activation'", "'activations'", "none"});
  expect_error([] { parse_recompute_rule(""); }, {"unknown recomputation ''"});
  expect_error([] { parse_recompute_rule("*.mlp="); }, {"unknown recomputation ''"});
  expect_error([] { parse_recompute_rule("=both"); }, {"names no layers", "PATTERN=MODE"});
  for (const char* rule : {"stage:=both", "stage:x=both", "stage:-1=both", "stage:1x=both"}) {
    expect_error([&] { parse_recompute_rule(rule); }, {rule, "no stage number"});
  }
  expect_error([] { kinds_with({"*.mpl=both"}); }, {"no layer is called \"*.mpl\"", "did you mean"});
  expect_error([] { kinds_with({"stage:2=both"}, {2, 4}); }, {"stage:2 does not exist", "0 to 1"});
  expect_error([] { kinds_with({"stage:0=both"}); }, {"stage:0 needs the layers of each stage"});
  ModelSpec of = model();
  expect_error([&] { recompute(of, {Recompute::kNone}); }, {"6 layers", "got 1"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
