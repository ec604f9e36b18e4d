// Tests attention's softmax, forward and backward, for every instruction set that this CPU supports: causal and whole
// rows, with terms that are added to the scores, and with dropout.
#include "tests/nn/kernel_test_util.h"
#include "twobp/nn/kernels/rows/row_kernels.h"

namespace twobp::TWOBP_FILE {
namespace {

using namespace test;

class SoftmaxKernelsTest : public KernelFamilyTest<Kernels> {};

struct BlockShape {
  int64_t rows, cols, seen;
};
const std::vector<BlockShape> kCausalShapes = {{1, 1, 1}, {3, 3, 1}, {5, 22, 18}, {64, 64, 1}, {7, 71, 65}};
const std::vector<BlockShape> kWholeRows = {{3, 1, 1}, {3, 5, 5}, {3, 32, 32}, {3, 33, 33}, {3, 300, 300}};

// The factor of each probability.
template <typename T>
Buffer<T> kept_of(const ScoreBlock<T>& block) {
  Buffer<T> kept(block.rows * block.cols);
  for (int64_t i = 0; i < kept.size(); ++i) kept[i] = 1;
  encoder_kernels<T>().dropout(kept.data(), nullptr, kept.data(), block.rows, block.cols, block.dropout,
                               block.row_begin);
  return kept;
}

// Scores with deviation `spread`. `roundings` are those of the log-sum-exp and of the probabilities.
template <typename T>
void check(const Kernels<T>& k, const ScoreBlock<T>& block, double spread, double of_log_sum, double of_probabilities) {
  constexpr int64_t kDim = 5, kStride = 7;
  const int64_t cols = block.cols;
  const Buffer<T> scores(block.rows * cols, 1, spread), dp(block.rows * cols, 2);
  const Buffer<T> y(block.rows * kStride, 3), dy(block.rows * kStride, 4), kept = kept_of(block);
  Buffer<T> p = scores, log_sum(block.rows);
  k.softmax_forward(block, p.data(), log_sum.data());
  Buffer<T> again = scores, ds = dp;
  k.softmax_backward(block, again.data(), ds.data(), log_sum.data(), y.data(), dy.data(), kDim, kStride);
  std::vector<Real> expected_p, expected_log_sum, expected_ds;
  for (int64_t r = 0; r < block.rows; ++r) {
    const int64_t begin = block.starts == nullptr ? 0 : block.starts[r];
    const int64_t seen = std::min(block.seen + r, cols);
    const auto capped = [&](int64_t c) {
      const Real score = scores[r * cols + c] * Real(block.scale);
      return block.cap == 0 ? score : Real(block.cap) * std::tanh(score / Real(block.cap));
    };
    const auto logit = [&](int64_t c) { return capped(c) + (block.shift == nullptr ? 0 : Real(block.shift[c])); };
    const auto slope = [&](int64_t c) {
      const Real t = block.cap == 0 ? Real(0) : capped(c) / Real(block.cap);
      return 1 - t * t;
    };
    Real sum = 0, dot = 0;
    for (int64_t c = begin; c < seen; ++c) sum += std::exp(logit(c));
    for (int64_t d = 0; d < kDim; ++d) dot += y[r * kStride + d] * dy[r * kStride + d];
    expected_log_sum.push_back(std::log(sum));
    for (int64_t c = 0; c < cols; ++c) {
      const int64_t i = r * cols + c;
      const Real whole = c >= begin && c < seen ? std::exp(logit(c)) / sum : 0;
      const Real factor = c >= begin ? Real(kept[i - begin]) : 0;  // of the first column that a row sees on
      expected_p.push_back(whole * factor);
      expected_ds.push_back(whole * Real(block.scale) * slope(c) * (dp[i] * factor - dot));
    }
  }
  expect_close(log_sum, expected_log_sum, of_log_sum, std::max(1.0, largest(expected_log_sum)), "log-sum-exp");
  expect_close(p, expected_p, of_probabilities, 1, "probabilities");
  expect_close(again, expected_p, of_probabilities, 1, "probabilities of the backward");
  expect_close(ds, expected_ds, 200, 1, "gradients");
  for (int64_t i = 0; i < p.size(); ++i) {
    if (expected_p[i] == 0) {
      ASSERT_EQ(p[i], T(0)) << i;
      ASSERT_EQ(again[i], T(0)) << i;
    }
  }
}

template <typename T>
ScoreBlock<T> block_of(const BlockShape& shape) {
  ScoreBlock<T> block;
  block.rows = shape.rows;
  block.cols = shape.cols;
  block.seen = shape.seen;
  block.scale = T(0.375);
  block.mask_cols = shape.cols;
  return block;
}

TEST_P(SoftmaxKernelsTest, SeesNothingOfTheFuture) {
  for_each_type([]<typename T>(const Kernels<T>& k) {
    for (const BlockShape& shape : kCausalShapes) {
      SCOPED_TRACE(testing::Message() << shape.rows << " x " << shape.cols << " from " << shape.seen);
      check(k, block_of<T>(shape), 3, 8, 40);
    }
  });
}

TEST_P(SoftmaxKernelsTest, WholeRowsWithShift) {
  for_each_type([]<typename T>(const Kernels<T>& k) {
    for (const BlockShape& shape : kWholeRows) {
      SCOPED_TRACE(shape.cols);
      ScoreBlock<T> block = block_of<T>(shape);
      block.scale = T(0.25);
      const double roundings = static_cast<double>(shape.cols) + 60;
      check(k, block, 8, roundings, roundings);
      std::vector<T> shift(shape.cols, 0);
      if (shape.cols > 4) shift[3] = -30000;  // then the probability is 0
      block.shift = shift.data();
      check(k, block, 8, roundings, roundings);
    }
  });
}

TEST_P(SoftmaxKernelsTest, Dropout) {
  for_each_type([]<typename T>(const Kernels<T>& k) {
    for (const BlockShape& shape : {BlockShape{3, 300, 300}, {3, 1500, 1500}, {7, 71, 65}}) {
      SCOPED_TRACE(testing::Message() << shape.rows << " x " << shape.cols << " from " << shape.seen);
      ScoreBlock<T> block = block_of<T>(shape);
      block.dropout.key[0] = 123;
      block.dropout.threshold = 20000;
      block.dropout.scale = 1.5;
      block.row_begin = 4;
      const double roundings = static_cast<double>(shape.cols) + 60;
      check(k, block, 3, roundings, roundings);
      std::vector<T> shift(shape.cols, 0);
      shift[3] = -30000;
      block.shift = shift.data();
      check(k, block, 3, roundings, roundings);
    }
  });
}

// Rows that begin later, scores under a cap, and both with dropout.
TEST_P(SoftmaxKernelsTest, WindowsAndCaps) {
  for_each_type([]<typename T>(const Kernels<T>& k) {
    const std::vector<int64_t> starts = {0, 0, 3, 3, 60, 61, 70};
    for (const T cap : {T(0), T(0.7), T(4)}) {
      for (const uint32_t threshold : {0U, 20000U}) {
        SCOPED_TRACE(testing::Message() << "cap " << cap << ", threshold " << threshold);
        ScoreBlock<T> block = block_of<T>({7, 71, 65});
        block.starts = starts.data();
        block.cap = cap;
        block.dropout.key[0] = 123;
        block.dropout.threshold = threshold;
        block.dropout.scale = threshold == 0 ? 1 : 1.5;
        check(k, block, 3, 131, 131);
        std::vector<T> shift(71, 0);
        shift[63] = -30000;
        block.shift = shift.data();
        check(k, block, 3, 131, 131);
      }
    }
  });
}

// The scores are too large for exp, but only the differences from the largest matter.
TEST_P(SoftmaxKernelsTest, LargeScores) {
  for_each_type([]<typename T>(const Kernels<T>& k) {
    Buffer<T> scores(3), log_sum(1);
    scores[0] = 2e4F;
    scores[1] = 1e4F;
    scores[2] = 2e4F;
    ScoreBlock<T> block = block_of<T>({1, 3, 3});
    block.scale = 1;
    k.softmax_forward(block, scores.data(), log_sum.data());
    EXPECT_EQ(scores[0], T(0.5));
    EXPECT_EQ(scores[1], 0);
    EXPECT_EQ(scores[2], T(0.5));
    EXPECT_FLOAT_EQ(static_cast<float>(log_sum[0]), 2e4F + std::log(2.0F));
  });
}

INSTANTIATE_TEST_SUITE_P(Nn, SoftmaxKernelsTest, testing::ValuesIn(kernel_sets(kernels_tables())),
                         [](const testing::TestParamInfo<KernelSet>& info) { return info.param.name; });

}  // namespace
}  // namespace twobp::TWOBP_FILE
