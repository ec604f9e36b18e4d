// Compares the whole LLaMa on one device with the same model on autograd: loss and every gradient, in float64 and
// float32, tied and untied, with grouped heads, over micro-batches with different numbers of counted targets.
#include <map>

#include "tests/nn/layer_test_util.h"
#include "tests/nn/llama_reference.h"
#include "tests/nn/typed_options.h"
#include "twobp/models/decoder/family.h"
#include "twobp/models/models.h"
#include "twobp/nn/layer.h"

namespace twobp::TWOBP_FILE {
namespace {

using namespace test;

// All sizes differ, so that exchanging two of them causes an error. A deviation of 0.3 makes logits of size 1 to 10.
test::Typed<DecoderOptions> options(at::ScalarType dtype, bool tied, int64_t kv_heads = 2) {
  test::Typed<DecoderOptions> o;
  o.vocab = 13;
  o.dim = 10;
  o.layers = 2;
  o.heads = 4;
  o.kv_heads = kv_heads;
  o.head_dim = 6;
  o.hidden = 15;
  o.norm_eps = 1e-2;
  o.rope_theta = 500;
  o.tied = tied;
  o.init_std = 0.3;
  o.dtype = dtype;
  return o;
}

// Two micro-batches: 3 samples of 7 positions with 21 counted targets, and 1 sample of 9 positions with 2.
std::vector<Fields> batch(const test::Typed<DecoderOptions>& o) {
  std::vector<Fields> out;
  out.push_back({{"input_ids", random_ids({3, 7}, o.vocab, 1)}, {"labels", random_ids({3, 7}, o.vocab, 2)}});
  out.push_back({{"input_ids", random_ids({1, 9}, o.vocab, 3)}, {"labels", random_ids({1, 9}, o.vocab, 4)}});
  out[1].at("labels").narrow(1, 2, 7).fill_(-100);
  return out;
}

constexpr double kLossWeight = 1.0 / (21 + 2);

std::unique_ptr<Sequential> make_model(const test::Typed<DecoderOptions>& o) {
  std::vector<std::unique_ptr<Layer>> layers;
  for (const LayerSpec& spec : llama(o, o.settings()).layers) layers.push_back(spec.make());
  return std::make_unique<Sequential>(std::move(layers));
}

// Forward and backward consist of 4 halves of a block each: about 12 operations, with two sums of 10 to 36 numbers.
// Then a sum of 30 rows follows. If all terms have one sign, this gives at most 4 * 2 * (12 + 2 * 36) + 30 = 700
// roundings.
constexpr double kRoundings = 700;

// Runs F0 F1 I0 I1 W0 W1 through all layers and returns the loss.
double run_library(Sequential& model, const std::vector<Fields>& fields) {
  MicroBatch first(model, fields[0], 0, kLossWeight);
  MicroBatch second(model, fields[1], 1, kLossWeight);
  const double loss = first.forward({}).item<double>() + second.forward({}).item<double>();
  EXPECT_FALSE(first.p1({}).defined());
  EXPECT_FALSE(second.p1({}).defined());
  first.p2();
  second.p2();
  return loss;
}

void expect_autograd(const test::Typed<DecoderOptions>& o) {
  const auto model = make_model(o);
  const auto parameters = make_parameters(*model);
  LlamaReference reference(o, parameters);
  const std::vector<Fields> fields = batch(o);
  const double loss = run_library(*model, fields);
  const double expected = reference.backward(fields);
  EXPECT_NEAR(loss, expected, kRoundings * unit_roundoff(o.dtype) * expected);
  std::map<std::string, at::Tensor> sums;
  for (const auto& [name, grad] : parts_of(parameters, &Parameter::grad)) {
    at::Tensor& sum = sums[name];
    sum = sum.defined() ? sum + grad : grad.clone();
  }
  ASSERT_EQ(sums.size(), reference.weights().size());
  for (const auto& [name, weight] : reference.weights()) {
    expect_close(sums.at(name), weight.grad(), kRoundings, o.dtype, name);
    EXPECT_GT(largest(weight.grad()), 1e-3) << name;
  }
}

TEST(Llama, AgreesWithAutogradInFloat64) {
  expect_autograd(options(at::kDouble, false));
  expect_autograd(options(at::kDouble, true));
}

TEST(Llama, AgreesWithAutogradInFloat32) {
  expect_autograd(options(at::kFloat, false));
  expect_autograd(options(at::kFloat, true));
}

TEST(Llama, AgreesWithAutogradForEveryNumberOfKeyHeads) {
  for (const int64_t kv_heads : {1, 4}) expect_autograd(options(at::kDouble, false, kv_heads));
}

// A tied weight is one parameter per use, with the same name and value and separate gradient buffers. Neither gradient
// is the whole one, and their sum is.
TEST(Llama, EveryUseOfATiedWeightHasItsOwnGradient) {
  const test::Typed<DecoderOptions> o = options(at::kDouble, true);
  const auto model = make_model(o);
  const auto parameters = make_parameters(*model);
  std::vector<Parameter*> uses;
  for (Parameter* parameter : parameters) {
    if (parameter->name() == "model.embed_tokens.weight") uses.push_back(parameter);
  }
  ASSERT_EQ(uses.size(), 2u);
  EXPECT_EQ(uses[0], parameters.front());
  EXPECT_EQ(uses[1], parameters.back());
  EXPECT_TRUE(same_bits(uses[0]->value, uses[1]->value));
  EXPECT_FALSE(uses[0]->grad.is_alias_of(uses[1]->grad));
  LlamaReference reference(o, parameters);
  const std::vector<Fields> fields = batch(o);
  run_library(*model, fields);
  reference.backward(fields);
  const at::Tensor whole = reference.weights().at("model.embed_tokens.weight").grad();
  expect_close(uses[0]->grad + uses[1]->grad, whole, kRoundings, o.dtype, "the sum of the uses");
  for (const Parameter* use : uses) {
    EXPECT_GT(largest(use->grad), 1e-3);
    EXPECT_GT(largest(use->grad - whole), 1e-3);
  }
}

// The head of an untied model has its own weight.
TEST(Llama, UntiedWeightsDiffer) {
  const auto model = make_model(options(at::kFloat, false));
  const auto parameters = make_parameters(*model);
  EXPECT_EQ(parameters.back()->name(), "lm_head.weight");
  EXPECT_FALSE(same_bits(parameters.front()->value, parameters.back()->value));
}

// The benchmark model. Its loss is half the squared difference between the target and x + MLP(norm(x)), applied block
// after block. It is a mean over the 30 numbers of a sample.
TEST(Llama, StackOfMlpsAgreesWithAutograd) {
  test::Typed<MlpOptions> o;
  o.dim = 10;
  o.layers = 2;
  o.hidden = 15;
  o.init_std = 0.3;
  o.dtype = at::kDouble;
  const ModelSpec spec = mlp(o, o.settings());
  EXPECT_EQ(spec.input_field, "input");
  std::vector<std::unique_ptr<Layer>> layers;
  for (const LayerSpec& layer : spec.layers) layers.push_back(layer.make());
  Sequential model(std::move(layers));
  const auto parameters = make_parameters(model);
  MicroBatch micro_batch(model, {{"target", random({2, 3, 10}, 2)}}, 0, 0.5);
  const at::Tensor loss = micro_batch.forward(random({2, 3, 10}, 1));
  const at::Tensor dx = micro_batch.p1({});
  micro_batch.p2();

  std::vector<at::Tensor> weights;
  for (const Parameter* p : parameters) weights.push_back(p->value.clone().requires_grad_(true));
  const at::Tensor input = random({2, 3, 10}, 1).requires_grad_(true);
  at::Tensor x = input;
  for (size_t i = 0; i < weights.size(); i += 3) {
    const at::Tensor act =
        reference::swiglu(reference::linear(reference::rms_norm(x, weights[i], o.norm_eps), weights[i + 1]));
    x = x + reference::linear(act, weights[i + 2]);
  }
  const at::Tensor expected = (x - random({2, 3, 10}, 2)).square().sum() / (2 * 30.0) * 0.5;
  expected.backward();
  expect_close(loss, expected.detach(), kRoundings, at::kDouble, "loss");
  expect_close(dx, input.grad(), kRoundings, at::kDouble, "dx");
  for (size_t i = 0; i < weights.size(); ++i) {
    expect_close(parameters[i]->grad, weights[i].grad(), kRoundings, at::kDouble, parameters[i]->name());
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
