// Sums of squares are exact, so their bits do not depend on the order or on how tensors are cut.
#include "twobp/train/update/square_sums.h"

#include <cmath>
#include <limits>
#include <random>

#include <gtest/gtest.h>

#include "twobp/nn/kernels/rows/row_arguments.h"

namespace twobp::TWOBP_FILE {
namespace {

double sum_of(const std::vector<double>& numbers) {
  const at::Tensor sums = square_sums(1);
  for (const double number : numbers) add_exactly(number, sums.mutable_data_ptr<double>());
  return values_of(sums)[0];
}

TEST(SquareSums, AreExact) {
  EXPECT_EQ(sum_of({}), 0);
  for (const double number : {1.0, 3.0, 0.1, 1e-70, 0x1p-298, 0x1.fffffffffffffp200, 1e76, 1.0 / 3})
    EXPECT_EQ(sum_of({number}), number);
  EXPECT_EQ(sum_of({1e30, 1, 1e-30}), 1e30 + 1);
  EXPECT_EQ(sum_of({0x1p53, 1, 1}), 0x1p53 + 2);  // not so in float64, from the left
  EXPECT_EQ(sum_of({0x1p-400}), 0);
  EXPECT_TRUE(std::isinf(sum_of({0x1p300, 1})));
  EXPECT_TRUE(std::isinf(sum_of({std::numeric_limits<double>::infinity()})));
  EXPECT_TRUE(std::isnan(sum_of({1, std::nan("")})));
}

TEST(SquareSums, DoNotDependOnTheOrder) {
  std::mt19937 random(3);
  std::uniform_real_distribution<double> exponent(-200, 200);
  for (int round = 0; round < 50; ++round) {
    std::vector<double> numbers;
    for (int i = 0; i < 300; ++i) numbers.push_back(std::exp2(exponent(random)) * 1.1);
    const double expected = sum_of(numbers);
    std::shuffle(numbers.begin(), numbers.end(), random);
    EXPECT_EQ(sum_of(numbers), expected);
    // Of parts, added digit by digit, as ranks do.
    at::Tensor sums = square_sums(1);
    for (size_t begin = 0; begin < numbers.size(); begin += 100) {
      const at::Tensor part = square_sums(1);
      for (size_t i = begin; i < begin + 100; ++i) add_exactly(numbers[i], part.mutable_data_ptr<double>());
      sums += part;
    }
    EXPECT_EQ(values_of(sums)[0], expected);
  }
}

TEST(SquareSums, DoNotDependOnCuts) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
    const at::Tensor x = at::randn({5 * kSquareBlock + 77}, type);
    at::Tensor whole = square_sums(2), cut = square_sums(2);
    add_squares({x}, {1}, whole);
    for (const auto& [begin, end] : {std::pair(4, 6), std::pair(0, 1), std::pair(1, 4)}) {
      const int64_t first = begin * kSquareBlock;
      add_squares({x.narrow(0, first, std::min(end * kSquareBlock, x.numel()) - first)}, {1}, cut);
    }
    EXPECT_TRUE(whole.equal(cut));
    EXPECT_EQ(values_of(whole)[0], 0);
    const double expected = x.to(at::kDouble).square().sum().item<double>();
    EXPECT_NEAR(values_of(whole)[1], expected, (type == at::kFloat ? 1e-6 : 1e-13) * expected);
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
