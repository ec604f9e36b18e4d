// The causal softmax, forward and backward, for every instruction set this CPU has.
#include "tests/nn/kernel_test_util.h"

namespace twobp {
namespace {

using namespace test;

class SoftmaxKernelsTest : public testing::TestWithParam<KernelSet> {};

struct CausalShape {
  int64_t rows, cols, first;
};
const std::vector<CausalShape> kCausalShapes = {{1, 1, 0}, {3, 3, 0}, {5, 22, 17}, {64, 64, 0}, {7, 71, 64}};

template <typename T>
void check(const Kernels<T>& k, const CausalShape& shape) {
  constexpr int64_t kDim = 5, kStride = 7;
  const T scale = T(0.375);
  const Buffer<T> scores(shape.rows * shape.cols, 1, 3), dp(shape.rows * shape.cols, 2);
  const Buffer<T> y(shape.rows * kStride, 3), dy(shape.rows * kStride, 4);
  Buffer<T> p = scores, log_sum_exp(shape.rows);
  k.causal_softmax(p.data(), log_sum_exp.data(), shape.rows, shape.cols, shape.first, scale);
  Buffer<T> again = scores, ds = dp;
  k.causal_softmax_backward(again.data(), ds.data(), log_sum_exp.data(), y.data(), dy.data(), shape.rows,
                            shape.cols, shape.first, scale, kDim, kStride);
  std::vector<Real> expected_p, expected_lse, expected_ds;
  for (int64_t r = 0; r < shape.rows; ++r) {
    const int64_t seen = shape.first + r + 1;
    Real sum = 0, dot = 0;
    for (int64_t c = 0; c < seen; ++c) sum += std::exp(scores[r * shape.cols + c] * Real(scale));
    for (int64_t d = 0; d < kDim; ++d) dot += y[r * kStride + d] * dy[r * kStride + d];
    expected_lse.push_back(std::log(sum));
    for (int64_t c = 0; c < shape.cols; ++c) {
      const int64_t i = r * shape.cols + c;
      expected_p.push_back(c < seen ? std::exp(scores[i] * Real(scale)) / sum : 0);
      expected_ds.push_back(expected_p.back() * Real(scale) * (dp[i] - dot));
    }
  }
  expect_close(log_sum_exp, expected_lse, 8, std::max(1.0, largest(expected_lse)), "log-sum-exp");
  expect_close(p, expected_p, 40, 1, "probabilities");
  expect_close(again, expected_p, 40, 1, "probabilities of the backward");
  expect_close(ds, expected_ds, 200, 1, "gradients");
}

TEST_P(SoftmaxKernelsTest, SeesNothingOfTheFuture) {
  for (const CausalShape& shape : kCausalShapes) {
    SCOPED_TRACE(testing::Message() << shape.rows << " x " << shape.cols << " from " << shape.first);
    check(*GetParam().of_float, shape);
    check(*GetParam().of_double, shape);
  }
}

// Larger than exp takes: only differences from the largest matter.
TEST_P(SoftmaxKernelsTest, LargeScores) {
  Buffer<float> scores(3), log_sum_exp(1);
  scores[0] = 2e4F;
  scores[1] = 1e4F;
  scores[2] = 2e4F;
  GetParam().of_float->causal_softmax(scores.data(), log_sum_exp.data(), 1, 3, 2, 1);
  EXPECT_EQ(scores[0], 0.5F);
  EXPECT_EQ(scores[1], 0);
  EXPECT_EQ(scores[2], 0.5F);
  EXPECT_FLOAT_EQ(log_sum_exp[0], 2e4F + std::log(2.0F));
}

INSTANTIATE_TEST_SUITE_P(Nn, SoftmaxKernelsTest, testing::ValuesIn(kernel_sets(kernels_tables())),
                         [](const testing::TestParamInfo<KernelSet>& info) { return info.param.name; });

}  // namespace
}  // namespace twobp
