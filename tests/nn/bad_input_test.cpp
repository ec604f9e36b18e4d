// A layer must refuse unusable input with an Error that describes the problem: token ids and labels outside the
// vocabulary, wrong sizes, wrong dtypes, missing fields, impossible models.
#include "tests/nn/layer_test_util.h"
#include "twobp/models/decoder/family.h"
#include "twobp/models/models.h"
#include "twobp/nn/layer.h"
#include "twobp/nn/layers/activations.h"
#include "twobp/nn/layers/attention.h"
#include "twobp/nn/layers/embedding.h"
#include "twobp/nn/layers/experts.h"
#include "twobp/nn/layers/linear.h"
#include "twobp/nn/layers/losses.h"
#include "twobp/nn/layers/norms.h"
#include "twobp/nn/layers/residual.h"
#include "twobp/nn/layers/squared_error.h"

namespace twobp::TWOBP_FILE {
namespace {

using namespace test;

at::Tensor ids(const std::vector<int64_t>& values) {
  return at::tensor(values, at::kLong).view({1, -1});
}

void expect_forward_error(Layer& layer, const at::Tensor& x, const Fields& fields,
                          const std::vector<std::string>& parts) {
  make_parameters(layer);
  expect_error([&] { MicroBatch(layer, fields).forward(x); }, parts);
  expect_error([&] { MicroBatch(layer, fields).evaluate(x); }, parts);
}

TEST(BadInput, TokenIdOutsideTheVocabulary) {
  Embedding layer("e", 4, 3, 1, at::kFloat);
  expect_forward_error(layer, {}, {{"input_ids", ids({0, 3, 4})}}, {"token id 4", "position 2", "vocabulary of 4"});
  expect_forward_error(layer, {}, {{"input_ids", ids({0, -1, 9})}}, {"token id -1", "position 1", "vocabulary"});
}

#if !defined(__SANITIZE_ADDRESS__)  // AddressSanitizer ends the program

TEST(BadInput, TokensOfExpertsThatNoMemoryHolds) {
  constexpr int64_t kTokens = int64_t{1} << 22U, kHidden = int64_t{1} << 23U;  // 2^48 bytes of gate and up
  Experts layer({"mlp.gate", "experts", "gate", "up", "down"}, {.dim = 1, .hidden = kHidden, .experts = 1, .chosen = 1},
                1, at::kFloat);
  make_parameters(layer);
  expect_error(
      [&] {
        MicroBatch(layer, {}).forward(at::ones({kTokens, 1}));
      },
      {"experts of mlp.gate", std::to_string(kTokens) + " rows", std::to_string(kTokens * kHidden * 2 * 4)});
}

TEST(BadInput, WOfExpertsThatNoMemoryHolds) {
  constexpr int64_t kRows = int64_t{1} << 26U, kDim = int64_t{1} << 20U;  // 2^48 bytes of the tokens' rows
  GroupedLinear layer({{"experts.0.gate.weight", 1}}, 1, kDim, 1, at::kFloat, GroupedLinear::Tokens::kInput);
  make_parameters(layer);
  Saved saved;
  saved.keep_until_p2(at::ones({1, kDim}));
  saved.keep_until_p2(at::full({1}, kRows));
  saved.keep_until_p2(at::zeros({1}, at::kLong).expand({kRows}));
  saved.keep_until_p2(at::ones({1, 1}).expand({kRows, 1}));
  Saved* const one = &saved;
  expect_error(
      [&] {
        layer.backward_p2({&one, 1});
      },
      {"W of experts.0.gate.weight", std::to_string(kRows) + " rows", std::to_string(kRows * kDim * 4)});
}

#endif

TEST(BadInput, RouterThatGivesNoNumbers) {
  Experts layer({"mlp.gate", "experts", "gate", "up", "down"}, {4, 3, 4, 2, true}, 1, at::kFloat);
  make_parameters(layer);
  at::Tensor x = at::ones({2, 3, 4});
  MicroBatch finite(layer, {});
  finite.p1(at::ones_like(finite.forward(x)));
  x[1][2][0] = std::nan("");
  expect_error([&] { MicroBatch(layer, {}).evaluate(x); }, {"router mlp.gate", "NaN", "optimizer.lr"});
  MicroBatch training(layer, {});
  const at::Tensor y = training.forward(x);
  expect_error([&] { training.p1(at::ones_like(y)); }, {"router mlp.gate", "NaN"});
  // The advice is what can help.
  const auto advice = [&](at::ScalarType type, bool balanced) -> std::string {
    Experts layer({"mlp.gate", "experts", "gate", "up", "down"},
                  {.dim = 4, .hidden = 3, .experts = 4, .chosen = 2, .balanced = balanced}, 1, type);
    make_parameters(layer);
    try {
      MicroBatch(layer, {}).evaluate(x.to(type));
    } catch (const Error& error) {
      const std::string text = error.what();
      return text.substr(text.find("lower"));
    }
    return "";
  };
  EXPECT_EQ(advice(at::kFloat, false), "lower optimizer.lr, or set train.clip_norm");
  EXPECT_EQ(advice(at::kFloat, true), "lower optimizer.lr or model.balance_loss, or set train.clip_norm");
  EXPECT_EQ(advice(at::kBFloat16, false), "lower optimizer.lr, or set train.clip_norm, or compute in fp32");
}

TEST(BadInput, InputIdsOfAnotherKind) {
  Embedding layer("e", 4, 3, 1, at::kFloat);
  expect_forward_error(layer, {}, {{"input_ids", at::zeros({1, 3}, at::kFloat)}}, {"input_ids", "int64", "Float"});
  expect_forward_error(layer, {}, {{"input_ids", at::zeros({3}, at::kLong)}},
                       {"input_ids", "(batch, sequence)", "[3]"});
}

TEST(BadInput, MissingFields) {
  Embedding embedding("e", 4, 3, 1, at::kFloat);
  expect_forward_error(embedding, {}, {}, {"input_ids", "none"});
  CrossEntropy loss;
  expect_forward_error(loss, at::zeros({1, 2, 3}), {{"input_ids", ids({1, 2})}}, {"labels", "it has input_ids"});
  SquaredError error;
  expect_forward_error(error, at::zeros({1, 2, 3}), {}, {"target"});
  Context no_fields;
  Saved saved;
  expect_error([&] { embedding.forward({}, no_fields, saved); }, {"no fields", "input_ids"});
}

TEST(BadInput, LabelOutsideTheVocabulary) {
  CrossEntropy layer;
  const at::Tensor logits = at::zeros({1, 3, 5});
  expect_forward_error(layer, logits, {{"labels", ids({1, 5, 0})}}, {"label 5", "position 1", "vocabulary of 5"});
  expect_forward_error(layer, logits, {{"labels", ids({-1, 4, 0})}}, {"label -1", "position 0"});
}

TEST(BadInput, LabelsThatDoNotFit) {
  CrossEntropy layer;
  const at::Tensor logits = at::zeros({2, 3, 5});
  expect_forward_error(layer, logits, {{"labels", at::zeros({2, 2}, at::kLong)}}, {"labels [2, 2]", "[2, 3, 5]"});
  expect_forward_error(layer, logits, {{"labels", at::zeros({2, 3}, at::kInt)}}, {"labels", "Int", "int64"});
  // Equally many labels, but at other positions.
  expect_forward_error(layer, logits, {{"labels", at::zeros({3, 2}, at::kLong)}}, {"labels [3, 2]", "[2, 3, 5]"});
}

TEST(BadInput, TargetThatDoesNotFit) {
  SquaredError layer;
  const at::Tensor x = at::zeros({2, 3});
  expect_forward_error(layer, x, {{"target", at::zeros({3, 2})}}, {"target [3, 2]", "[2, 3]"});
  expect_forward_error(layer, x, {{"target", at::zeros({2, 1})}}, {"target [2, 1]", "[2, 3]"});
  expect_forward_error(layer, x, {{"target", at::zeros({2, 3}, at::kDouble)}}, {"target", "Double", "Float"});
}

TEST(BadInput, WrongLastDimension) {
  const at::Tensor x = at::zeros({2, 3, 6});
  Linear linear({{"lin", 3}}, 5, 1, at::kFloat);
  expect_forward_error(linear, x, {}, {"lin", "(..., 5)", "[2, 3, 6]"});
  RmsNorm norm("gain", 5, 1e-5, at::kFloat);
  expect_forward_error(norm, x, {}, {"gain", "(..., 5)", "[2, 3, 6]"});
  Attention attention({2, 1, 4, 10000}, at::kFloat);
  expect_forward_error(attention, x, {}, {"attention", "16", "[2, 3, 6]"});
  expect_forward_error(attention, at::zeros({3, 16}), {}, {"attention", "[3, 16]"});
  GatedUnit swiglu(Gate::kSilu);
  expect_forward_error(swiglu, at::zeros({2, 3, 5}), {}, {"SwiGlu", "[2, 3, 5]"});
}

TEST(BadInput, NoInputWhereOneIsNeeded) {
  Linear linear({{"lin", 3}}, 5, 1, at::kFloat);
  expect_forward_error(linear, {}, {}, {"lin", "(..., 5)"});
}

TEST(BadInput, WrongDtype) {
  const at::Tensor x = at::zeros({2, 3, 16}, at::kDouble);
  Linear linear({{"lin", 3}}, 16, 1, at::kFloat);
  expect_forward_error(linear, x, {}, {"lin", "Float", "Double"});
  RmsNorm norm("gain", 16, 1e-5, at::kFloat);
  expect_forward_error(norm, x, {}, {"gain", "Float", "Double"});
  Attention attention({2, 1, 4, 10000}, at::kFloat);
  expect_forward_error(attention, x, {}, {"ttention", "Float", "Double"});
}

TEST(BadInput, DtypesWithoutKernels) {
  const at::Tensor x = at::zeros({1, 3, 16}, at::kInt);
  RmsNorm norm("gain", 16, 1e-5, at::kInt);
  expect_forward_error(norm, x, {}, {"RmsNorm", "Int", "float32"});
  GatedUnit swiglu(Gate::kSilu);
  expect_forward_error(swiglu, x, {}, {"SwiGlu", "Int", "float32"});
  CrossEntropy loss;
  expect_forward_error(loss, at::zeros({1, 3, 16}, at::kLong), {{"labels", ids({1, 2, 3})}}, {"CrossEntropy", "Long"});
}

// A gradient whose sizes differ from the output's must not be read past its end.
TEST(BadInput, GradientThatDoesNotFit) {
  const auto expect_p1_error = [](Layer& layer, const at::Tensor& x, const Fields& fields, const at::Tensor& dy,
                                  const std::vector<std::string>& parts) {
    make_parameters(layer);
    MicroBatch micro_batch(layer, fields);
    micro_batch.forward(x);
    expect_error([&] { micro_batch.p1(dy); }, parts);
  };
  const at::Tensor x = at::zeros({2, 3, 16});
  const at::Tensor short_one = at::zeros({1, 3, 16});
  RmsNorm norm("gain", 16, 1e-5, at::kFloat);
  expect_p1_error(norm, x, {}, short_one, {"RmsNorm", "[1, 3, 16]", "[2, 3, 16]"});
  GatedUnit swiglu(Gate::kSilu);
  expect_p1_error(swiglu, x, {}, short_one, {"SwiGlu", "[1, 3, 16]", "[2, 3, 8]"});
  Linear linear({{"lin", 16}}, 16, 1, at::kFloat);
  expect_p1_error(linear, x, {}, short_one, {"lin", "[1, 3, 16]"});
  Attention attention({2, 1, 4, 10000}, at::kFloat);
  expect_p1_error(attention, x, {}, at::zeros({1, 3, 8}), {"ttention", "[1, 3, 8]", "(2, 3, 8)"});
  Embedding embedding("emb", 4, 16, 1, at::kFloat);
  expect_p1_error(embedding, {}, {{"input_ids", at::zeros({2, 3}, at::kLong)}}, short_one, {"emb", "[1, 3, 16]"});
}

TEST(BadInput, ImpossibleShapes) {
  expect_error([] { Attention({4, 3, 4, 10000}, at::kFloat); }, {"4 heads", "3 key-value heads"});
  expect_error([] { Attention({4, 0, 4, 10000}, at::kFloat); }, {"0 key-value heads"});
  expect_error([] { Attention({4, 2, 5, 10000}, at::kFloat); }, {"even head_dim", "5"});
  expect_error([] { Sequential({}); }, {"at least one layer"});
  DecoderOptions no_layers;
  no_layers.layers = 0;
  expect_error([&] { llama(no_layers); }, {"at least one layer"});
  DecoderOptions no_heads;
  no_heads.heads = 0;
  expect_error([&] { llama(no_heads); }, {"at least one head"});
  MlpOptions no_width;
  no_width.dim = 0;
  expect_error([&] { mlp(no_width); }, {"at least 1"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
