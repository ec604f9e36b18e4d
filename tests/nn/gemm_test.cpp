// Tests matrix products in any library against float64. The error must be within the bound for any order of summation.
#include <limits>

#include <gtest/gtest.h>

#include "tests/nn/layer_test_util.h"
#include "twobp/nn/kernels/products/products.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::random;

constexpr int64_t kRows = 192, kInner = 320, kCols = 448;  // large enough for oneDNN

struct Operands {
  explicit Operands(int64_t rows = kRows, int64_t inner = kInner, int64_t cols = kCols)
      : a(random({rows, inner}, 1, at::kFloat)),
        b(random({inner, cols}, 2, at::kFloat)),
        y(random({rows, cols}, 3, at::kFloat)) {}
  at::Tensor a, b, y;
};

// Returns the same matrix, stored as it is or as a transposed view of its transpose.
at::Tensor stored(const at::Tensor& t, bool transposed) {
  return transposed ? t.t().contiguous().t() : t;
}

// A sum of kInner products and y has at most that many roundings, plus two.
void expect_product(const at::Tensor& actual, const Operands& of, double scale, bool adds) {
  const at::Tensor a = of.a.to(at::kDouble), b = of.b.to(at::kDouble);
  at::Tensor expected = scale * a.mm(b);
  at::Tensor bound = scale * a.abs().mm(b.abs());
  if (adds) {
    expected += of.y;
    bound += of.y.abs();
  }
  bound *= (static_cast<double>(of.a.size(1)) + 2) * static_cast<double>(std::numeric_limits<float>::epsilon());
  EXPECT_TRUE(((actual.to(at::kDouble) - expected).abs() <= bound).all().item<bool>());
}

class GemmLibraries : public testing::TestWithParam<bool> {};

TEST_P(GemmLibraries, LargeProductsOfEitherSideTransposed) {
  const OneDnnForced one_dnn(GetParam());
  if (one_dnn_multiplies() != GetParam()) GTEST_SKIP() << "LibTorch has no oneDNN, or the CPU no AVX-512";
  const Operands of;
  for (const bool a_transposed : {false, true}) {
    for (const bool b_transposed : {false, true}) {
      const at::Tensor a = stored(of.a, a_transposed);
      const at::Tensor b = stored(of.b, b_transposed);
      at::Tensor y = at::full_like(of.y, std::numeric_limits<float>::quiet_NaN());
      multiply_into(y, a, b);
      expect_product(y, of, 1, false);
      y.copy_(of.y);
      multiply_add(y, a, b, 0.5);
      expect_product(y, of, 0.5, true);
      at::Tensor again = of.y.clone();
      multiply_add(again, a, b, 0.5);
      EXPECT_TRUE(again.equal(y)) << "the same bits each time";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Gemm, GemmLibraries, testing::Bool(),
                         [](const auto& info) { return info.param ? "OneDnn" : "Mkl"; });

// W of projections to or from few numbers has such products. The terms are summed in several parts, and the last part
// is shorter.
TEST(Gemm, NarrowProductsOfManyTerms) {
  for (const auto& [rows, cols] : {std::pair{4096, 16}, {16, 4096}, {1024, 64}, {64, 1000}}) {
    for (const int64_t terms : {0, 1, 30, 101}) {
      const Operands of(rows, terms, cols);
      const at::Tensor a = stored(of.a, true);
      at::Tensor y = at::full_like(of.y, std::numeric_limits<float>::quiet_NaN());
      multiply_into(y, a, of.b);
      expect_product(y, of, 1, false);
      y.copy_(of.y);
      multiply_add(y, a, of.b, 0.5);
      expect_product(y, of, 0.5, true);
    }
  }
}

// A column of a wider matrix, and rows with gaps between them.
TEST(Gemm, LargeProductsOfMatricesWithinOthers) {
  const Operands of;
  const at::Tensor wide = random({kRows, 2 * kInner}, 4, at::kFloat);
  wide.narrow(1, 0, kInner).copy_(of.a);
  at::Tensor y = at::empty_like(of.y);
  multiply_into(y, wide.narrow(1, 0, kInner), of.b);
  expect_product(y, of, 1, false);
  at::Tensor apart = at::zeros({kRows, kCols + 3}).narrow(1, 0, kCols);
  multiply_add(apart, of.a, of.b);
  Operands zero = of;
  zero.y = at::zeros_like(of.y);
  expect_product(apart, zero, 1, true);
}

TEST(OneDnn, TakesOnlyProductsThatItComputesFaster) {
  const OneDnnForced one_dnn(true);
  if (!one_dnn_multiplies()) GTEST_SKIP() << "LibTorch has no oneDNN, or the CPU no AVX-512";
  const Operands of;
  EXPECT_TRUE(one_dnn_is_faster(of.y, of.a, of.b));
  EXPECT_TRUE(one_dnn_is_faster(of.y, stored(of.a, true), stored(of.b, true)));
  EXPECT_FALSE(one_dnn_is_faster(of.y.narrow(0, 0, 8), of.a.narrow(0, 0, 8), of.b)) << "small";
  EXPECT_FALSE(one_dnn_is_faster(of.y.to(at::kDouble), of.a.to(at::kDouble), of.b.to(at::kDouble)));
  const at::Tensor wide = random({kRows, 2 * kInner}, 4, at::kFloat);
  EXPECT_FALSE(one_dnn_is_faster(of.y, wide.narrow(1, 0, kInner), of.b)) << "oneDNN would copy its rows";
  at::Tensor y = at::empty_like(of.y);
  one_dnn_product(y, of.a, of.b, 0, 1);
  at::Tensor through = at::empty_like(of.y);
  multiply_into(through, of.a, of.b);
  EXPECT_TRUE(through.equal(y)) << "layers multiply by the same function";
  const OneDnnForced mkl(false);
  EXPECT_FALSE(one_dnn_is_faster(of.y, of.a, of.b));
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
