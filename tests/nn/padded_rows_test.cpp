// Tests rows whose distance is an odd number of cache lines: which layers use them, and that all numbers stay the same.
#include "tests/nn/layer_test_util.h"
#include "twobp/nn/kernels/products/products.h"
#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/layer.h"
#include "twobp/nn/layers/activations.h"
#include "twobp/nn/layers/attention.h"
#include "twobp/nn/layers/linear.h"
#include "twobp/nn/layers/losses.h"

namespace twobp::TWOBP_FILE {
namespace {

using namespace test;

const at::TensorOptions kFloats = at::TensorOptions().dtype(at::kFloat);

TEST(PaddedRows, AreAnOddNumberOfLinesApart) {
  const OneDnnForced mkl(false);
  EXPECT_EQ(padded_cols(1408, kFloats), 1424);
  EXPECT_EQ(padded_cols(1424, kFloats), 1424);
  EXPECT_EQ(padded_cols(1409, kFloats), 1424);
  EXPECT_EQ(padded_cols(1425, kFloats), 1456);
  EXPECT_EQ(padded_cols(1408, kFloats.dtype(at::kDouble)), 1416);
  EXPECT_EQ(padded_cols(255, kFloats), 255) << "short";
  EXPECT_EQ(padded_cols(1408, kFloats.dtype(at::kBFloat16)), 1408) << "not MKL's";
  const at::Tensor t = empty_rows({2, 3, 1408}, kFloats, /*padded=*/true);
  EXPECT_EQ(t.sizes(), (std::vector<int64_t>{2, 3, 1408}));
  EXPECT_EQ(t.strides(), (std::vector<int64_t>{3 * 1424, 1424, 1}));
}

TEST(PaddedRows, AreDenseWhereOneDnnMultiplies) {
  const OneDnnForced one_dnn(true);
  if (!one_dnn_multiplies()) GTEST_SKIP() << "LibTorch has no oneDNN";
  EXPECT_EQ(padded_cols(1408, kFloats), 1408);
}

TEST(PaddedRows, EvenRowsAreOneMatrix) {
  const at::Tensor padded = at::randn({2, 3, 7}).narrow(2, 0, 5);
  EXPECT_TRUE(has_even_rows(padded));
  EXPECT_EQ(row_stride(padded), 7);
  EXPECT_TRUE(with_even_rows(padded).is_same(padded));
  EXPECT_TRUE(has_even_rows(at::randn({2, 5})));
  EXPECT_EQ(row_stride(at::randn({1, 5})), 5);
  for (const at::Tensor& uneven : {at::randn({2, 4, 5}).narrow(1, 0, 3), at::randn({5, 4}).t(),
                                   at::randn({2, 3, 10}).slice(2, 0, 10, 2), at::randn({1, 5}).expand({3, 5})}) {
    EXPECT_FALSE(has_even_rows(uneven)) << uneven.strides();
    const at::Tensor even = with_even_rows(uneven);
    EXPECT_TRUE(even.is_contiguous());
    EXPECT_TRUE(same_bits(even, uneven));
  }
}

// Hides the next layer from this one, so that its rows are dense.
class Untold : public Layer {
 public:
  explicit Untold(std::unique_ptr<Layer> layer) : layer_(std::move(layer)) {}
  Values forward(Values x, Context& context, Saved& saved) override {
    return layer_->forward(std::move(x), context, saved);
  }
  Values backward_p1(Values dy, Context& context, Saved& saved) override {
    return layer_->backward_p1(std::move(dy), context, saved);
  }
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override { layer_->collect_p2(saved, units); }
  void collect_parameters(std::vector<Parameter*>& parameters) override { layer_->collect_parameters(parameters); }

 private:
  std::unique_ptr<Layer> layer_;
};

struct Case {
  const char* name;
  int64_t wide;  // the layer's input width, over 1 KiB in float64
  int64_t narrow;
  bool bias;
  std::function<std::unique_ptr<Layer>()> make;
};

const Case kCases[] = {
    {"SwiGlu", 320, 160, false, [] { return std::make_unique<GatedUnit>(Gate::kSilu); }},
    {"Attention", 320, 160, false,
     [] {
       return std::make_unique<Attention>(AttentionShape{4, 2, 40, {}}, at::kDouble);
     }},
    {"BidirectionalAttention", 384, 128, true,
     [] {
       return std::make_unique<BidirectionalAttention>(BidirectionalAttentionShape{4, 32}, 0.0, "a", at::kDouble);
     }},
};

class PaddedRowsTest : public testing::TestWithParam<Case> {
 protected:
  static constexpr int64_t kIn = 24;

  // Runs three micro-batches through Linear -> the layer -> Linear. Returns outputs, dx and gradients. With `together`,
  // W of all micro-batches is one call.
  std::vector<at::Tensor> results(bool told, bool together) {
    auto first = std::make_unique<Linear>(std::vector<ParameterPart>{{"a.weight", GetParam().wide}}, kIn, 0.2,
                                          at::kDouble, GetParam().bias);
    auto last =
        std::make_unique<Linear>(std::vector<ParameterPart>{{"b.weight", kIn}}, GetParam().narrow, 0.2, at::kDouble);
    std::unique_ptr<Layer> producer = std::move(first);
    if (!told) producer = std::make_unique<Untold>(std::move(producer));
    auto chain = make_sequential(std::move(producer), GetParam().make(), std::move(last));
    const std::vector<Parameter*> parameters = make_parameters(*chain);
    std::vector<at::Tensor> out;
    std::vector<std::unique_ptr<MicroBatch>> micro_batches;
    std::vector<MicroBatch*> list;
    for (int64_t m = 0; m < 3; ++m) {
      micro_batches.push_back(std::make_unique<MicroBatch>(*chain, Fields{}, m));
      list.push_back(micro_batches.back().get());
      out.push_back(list.back()->forward(random({2, 9, kIn}, 10 + m)));
      out.push_back(list.back()->p1(random({2, 9, kIn}, 20 + m)));
      std::vector<P2Unit> units = list.back()->p2_units();
      const at::Tensor& gradient = units.back().saved->p2(1);  // the first Linear's output gradient
      EXPECT_EQ(row_stride(gradient), told ? padded_cols(GetParam().wide, gradient.options()) : GetParam().wide);
    }
    if (together) {
      p2_together(list);
    } else {
      for (MicroBatch* one : list) one->p2();
    }
    for (const at::Tensor& grad : copy_grads(parameters)) out.push_back(grad);
    return out;
  }
};

TEST_P(PaddedRowsTest, SameNumbersAsDenseOnes) {
  const OneDnnForced mkl(false);
  ASSERT_GT(padded_cols(GetParam().wide, kFloats.dtype(at::kDouble)), GetParam().wide);
  for (const bool together : {false, true}) {
    const std::vector<at::Tensor> dense = results(false, together);
    const std::vector<at::Tensor> padded = results(true, together);
    ASSERT_EQ(dense.size(), padded.size());
    // Sums of up to 320 numbers, a few of them in sequence.
    for (size_t i = 0; i < dense.size(); ++i) {
      expect_close(padded[i], dense[i], 4 * 320, at::kDouble, "result " + std::to_string(i));
    }
  }
}

// The loss overwrites the logits with their gradient.
TEST(PaddedRows, TheLossTakesThem) {
  const OneDnnForced mkl(false);
  constexpr int64_t kIn = 24, kVocab = 320;
  const Fields fields = {{"labels", at::randint(0, kVocab, {2, 9}, at::kLong)}};
  fields.at("labels")[1][3] = kIgnoreLabel;
  std::vector<std::vector<at::Tensor>> results;
  for (const bool told : {false, true}) {
    std::unique_ptr<Layer> head =
        std::make_unique<Linear>(std::vector<ParameterPart>{{"head.weight", kVocab}}, kIn, 0.2, at::kDouble);
    if (!told) head = std::make_unique<Untold>(std::move(head));
    auto chain = make_sequential(std::move(head), std::make_unique<CrossEntropy>());
    const std::vector<Parameter*> parameters = make_parameters(*chain);
    MicroBatch one(*chain, fields, 0);
    auto& out = results.emplace_back();
    out.push_back(one.forward(random({2, 9, kIn}, 1)));
    out.push_back(one.p1({}));
    const at::Tensor gradient = one.p2_units().back().saved->p2(1);
    EXPECT_EQ(row_stride(gradient), told ? padded_cols(kVocab, gradient.options()) : kVocab);
    one.p2();
    for (const at::Tensor& grad : copy_grads(parameters)) out.push_back(grad);
  }
  for (size_t i = 0; i < results[0].size(); ++i) {
    expect_close(results[1][i], results[0][i], 4 * kVocab, at::kDouble, "result " + std::to_string(i));
  }
}

INSTANTIATE_TEST_SUITE_P(Layers, PaddedRowsTest, testing::ValuesIn(kCases),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace twobp::TWOBP_FILE
