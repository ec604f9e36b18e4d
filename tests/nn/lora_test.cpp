// Compares LoRA adapters with autograd, and checks that other parameters are unchanged.
#include <gtest/gtest.h>

#include "tests/nn/layer_test_util.h"
#include "twobp/models/decoder/family.h"
#include "twobp/models/freeze.h"
#include "twobp/nn/layers/experts.h"
#include "twobp/nn/layers/lora_linear.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::random;

const std::vector<ParameterPart> kParts = {{"b.q_proj.weight", 5}, {"b.k_proj.weight", 3}, {"b.v_proj.weight", 4}};
constexpr int64_t kIn = 7;
const LoraOptions kLora{2, 6, {"q_proj", "v_proj"}};

std::vector<Parameter*> made_parameters(Layer& layer) {
  std::vector<Parameter*> parameters = test::make_parameters(layer);
  for (Parameter* p : parameters) p->value.copy_(random(p->sizes(), 11 + p->numel()));  // the initial B is 0
  return parameters;
}

TEST(Lora, AgreesWithAutograd) {
  LoraLinear layer(kParts, kIn, 0.5, at::kDouble, kLora);
  const auto parameters = made_parameters(layer);
  ASSERT_EQ(parameters.size(), 5u);  // the packed weight, then A and B of q and of v
  at::Tensor x = random({2, 3, kIn}, 1).requires_grad_(true);
  std::vector<at::Tensor> w;
  for (const Parameter* p : parameters) w.push_back(p->value.clone().requires_grad_(true));
  const at::Tensor q = at::matmul(at::matmul(x, w[1].t()), w[2].t()) * 3;
  const at::Tensor v = at::matmul(at::matmul(x, w[3].t()), w[4].t()) * 3;
  const at::Tensor y = at::matmul(x, w[0].t()) + at::cat({q, at::zeros({2, 3, 3}, at::kDouble), v}, 2);
  const at::Tensor dy = random({2, 3, 12}, 2);
  y.backward(dy);

  test::MicroBatch micro_batch(layer);
  const double roundings = 60;
  test::expect_close(micro_batch.forward(x.detach().clone()), y.detach(), roundings, at::kDouble, "y");
  test::expect_close(micro_batch.p1(dy.clone()), x.grad(), roundings, at::kDouble, "dx");
  micro_batch.p2();
  EXPECT_FALSE(parameters[0]->has_grad());
  EXPECT_FALSE(parameters[0]->grad.defined()) << "a frozen weight has no gradient buffer";
  for (size_t i = 1; i < 5; ++i) {
    test::expect_close(parameters[i]->grad, w[i].grad(), roundings, at::kDouble, parameters[i]->name());
  }
}

// Each expert has adapters of its own. The reference computes all experts for every token.
TEST(Lora, OfExpertsAgreesWithAutograd) {
  const ExpertsShape shape{.dim = 5, .hidden = 3, .experts = 4, .chosen = 2, .normalized = true};
  ExpertsNames names{"router", "expert", "gate", "up", "down"};
  names.input_module = "mlp.experts.gate_up_proj";
  names.output_module = "mlp.experts.down_proj";
  const LoraOptions lora{2, 6, {"experts.gate_up_proj", "experts.down_proj"}};
  Experts layer(names, shape, 0.5, at::kDouble, nullptr, lora);
  const auto parameters = made_parameters(layer);
  ASSERT_EQ(parameters.size(), 7u);  // the router, then the weight, A and B of gate and up, and of down
  EXPECT_EQ(parameters[3]->parts()[1].name, "mlp.experts.gate_up_proj.1.lora_B.weight");
  at::Tensor x = random({7, 5}, 1).requires_grad_(true);
  std::vector<at::Tensor> w;
  for (const Parameter* p : parameters) w.push_back(p->value.clone().requires_grad_(true));
  const auto of = [&](size_t first, int64_t expert, const at::Tensor& in) {
    const auto part = [&](size_t i) { return w[first + i].chunk(4)[expert]; };
    return at::matmul(in, part(0).t()) + at::matmul(at::matmul(in, part(1).t()), part(2).t()) * 3;
  };
  const at::Tensor scores = at::softmax(at::matmul(x, w[0].t()), -1);
  const at::Tensor chosen = at::zeros_like(scores).scatter(-1, std::get<1>(at::topk(scores, 2, -1)), 1);
  const at::Tensor weights = scores * chosen / (scores * chosen).sum(-1, true);
  at::Tensor y = at::zeros({7, 5}, at::kDouble);
  for (int64_t e = 0; e < 4; ++e) {
    const auto halves = of(1, e, x).chunk(2, -1);
    y = y + weights.select(-1, e).unsqueeze(-1) * of(4, e, at::silu(halves[0]) * halves[1]);
  }
  const at::Tensor dy = random({7, 5}, 2);
  y.backward(dy);

  test::MicroBatch micro_batch(layer);
  const double roundings = 200;
  test::expect_close(micro_batch.forward(x.detach().clone()), y.detach(), roundings, at::kDouble, "y");
  test::expect_close(micro_batch.p1(dy.clone()), x.grad(), roundings, at::kDouble, "dx");
  micro_batch.p2();
  for (size_t i = 0; i < 7; ++i) {
    EXPECT_EQ(parameters[i]->has_grad(), i != 1 && i != 4) << "only the weights of experts are frozen";
    if (parameters[i]->has_grad())
      test::expect_close(parameters[i]->grad, w[i].grad(), roundings, at::kDouble, parameters[i]->name());
  }
}

TEST(Lora, StartsAsTheModelItAdapts) {
  LoraLinear layer(kParts, kIn, 0.5, at::kDouble, kLora);
  Linear plain(kParts, kIn, 0.5, at::kDouble);
  test::make_parameters(layer);
  test::make_parameters(plain);
  const at::Tensor x = random({4, kIn}, 1);
  EXPECT_TRUE(at::equal(test::MicroBatch(layer).forward(x.clone()), test::MicroBatch(plain).forward(x.clone())));
}

TEST(Lora, NamesAndTargets) {
  LoraLinear layer(kParts, kIn, 0.5, at::kFloat, kLora);
  std::vector<Parameter*> parameters;
  layer.collect_parameters(parameters);
  EXPECT_EQ(parameters[1]->name(), "b.q_proj.lora_A.weight");
  EXPECT_EQ(parameters[1]->sizes(), (std::vector<int64_t>{2, kIn}));
  EXPECT_EQ(parameters[4]->name(), "b.v_proj.lora_B.weight");
  EXPECT_EQ(parameters[4]->sizes(), (std::vector<int64_t>{4, 2}));
  EXPECT_FALSE(LoraLinear::adapts({{"b.xq_proj.weight", 5}}, kLora)) << "a target matches whole parts of a name";
  EXPECT_FALSE(LoraLinear::adapts(kParts, {0, 16, {"q_proj"}}));
}

TEST(Freeze, Patterns) {
  EXPECT_TRUE(matches_pattern("model.layers.10.mlp.up_proj.weight", "model.layers.1?.*"));
  EXPECT_TRUE(matches_pattern("abc", "*"));
  EXPECT_TRUE(matches_pattern("", "*"));
  EXPECT_TRUE(matches_pattern("aXbXc", "a*c"));
  EXPECT_TRUE(matches_pattern("ababab", "*abab"));
  EXPECT_FALSE(matches_pattern("abc", "ab"));
  EXPECT_FALSE(matches_pattern("abc", "abcd"));
  EXPECT_FALSE(matches_pattern("abc", "?"));
  EXPECT_FALSE(matches_pattern("aXbXd", "a*c"));
}

TEST(Freeze, FindsTheFirstTrainableLayerAndMakesKinds) {
  ModelSpec model = llama({});
  const size_t layers = model.layers.size();
  freeze(model, {"model.embed_tokens.*", "model.layers.0.*", "*_layernorm.weight"});
  EXPECT_EQ(model.first_trainable, 3) << "embedding and both halves of block 0 are frozen";
  EXPECT_NE(model.layers[1].kind, model.layers[3].kind);
  EXPECT_EQ(model.layers[3].kind, model.layers[5].kind);
  freeze(model, {"*"});
  EXPECT_EQ(model.first_trainable, static_cast<int>(layers));
}

TEST(Freeze, Errors) {
  ModelSpec model = llama({});
  test::expect_error([&] { freeze(model, {"model.layers.0.self_attn.q_prj.weight"}); },
                     {"q_prj", "did you mean", "q_proj"});
  test::expect_error([&] { freeze(model, {"*.q_proj.weight"}); }, {"q_proj", "k_proj", "one weight"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
