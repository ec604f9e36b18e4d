// Tests the order of samples that cost unequally, and the means of a list's parts.
#include "twobp/core/balanced_order.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <set>

#include <gtest/gtest.h>

#include "tests/expect_error.h"
#include "twobp/core/random.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_error;

TEST(BalancedOrder, PairsDearSamplesWithCheapOnes) {
  EXPECT_EQ(balanced_order({3, 3, 3, 3}, 2, 1, 2), (std::vector<size_t>{0, 1, 2, 3})) << "nothing to do";
  EXPECT_EQ(balanced_order({9, 8, 1, 2}, 1, 2, 2), (std::vector<size_t>{0, 2, 1, 3}));
  EXPECT_EQ(balanced_order({9, 8, 1, 2}, 2, 2, 1), (std::vector<size_t>{2, 0, 3, 1})) << "replicas";
  EXPECT_EQ(balanced_order({5, 1, 4, 2, 3}, 1, 5, 1), (std::vector<size_t>{1, 4, 0, 2, 3})) << "rise and fall";
  EXPECT_EQ(balanced_order({}, 1, 0, 1), std::vector<size_t>());
}

std::vector<int64_t> sums(const std::vector<int64_t>& costs, const std::vector<size_t>& order, int64_t bins) {
  std::vector<int64_t> sums(static_cast<size_t>(bins), 0);
  for (size_t i = 0; i < order.size(); ++i) sums[i * sums.size() / order.size()] += costs[order[i]];
  return sums;
}

int64_t spread(const std::vector<int64_t>& sums) {
  const auto [least, most] = std::minmax_element(sums.begin(), sums.end());
  return *most - *least;
}

TEST(BalancedOrder, KeepsEverySampleLevelsAndRisesThenFalls) {
  SplitMix64 random(1);
  double before = 0, after = 0;
  for (int round = 0; round < 100; ++round) {
    const auto replicas = static_cast<int64_t>(1 + bounded(random, 4));
    const auto micro_batches = static_cast<int64_t>(1 + bounded(random, 4));
    const auto size = static_cast<int64_t>(1 + bounded(random, 4));
    std::vector<int64_t> costs(static_cast<size_t>(replicas * micro_batches * size));
    for (int64_t& cost : costs) cost = static_cast<int64_t>(1 + bounded(random, 1000));
    const std::vector<size_t> order = balanced_order(costs, replicas, micro_batches, size);
    ASSERT_EQ(std::set<size_t>(order.begin(), order.end()).size(), costs.size());
    EXPECT_EQ(order, balanced_order(costs, replicas, micro_batches, size));
    std::vector<size_t> as_it_was(costs.size());
    std::iota(as_it_was.begin(), as_it_was.end(), size_t{0});
    for (const int64_t bins : {replicas, replicas * micro_batches}) {
      before += static_cast<double>(spread(sums(costs, as_it_was, bins)));
      after += static_cast<double>(spread(sums(costs, order, bins)));
    }
    const std::vector<int64_t> all = sums(costs, order, replicas * micro_batches);
    for (auto replica = all.begin(); replica != all.end(); replica += micro_batches) {
      const auto most = std::max_element(replica, replica + micro_batches);
      EXPECT_TRUE(std::is_sorted(replica, most + 1)) << "rises";
      EXPECT_TRUE(std::is_sorted(most, replica + micro_batches, std::greater<>())) << "and falls";
    }
  }
  EXPECT_LT(after, 0.5 * before);
}

TEST(BalancedOrder, RefusesABatchOfAnotherSize) {
  expect_error([] { balanced_order({1, 2, 3}, 2, 2, 1); }, {"3 samples", "2 x 2"});
}

TEST(MeansOfParts, KeepTheMean) {
  const auto means = [](size_t parts) { return means_of_parts({1, 2, 3, 6}, parts); };
  EXPECT_EQ(means(1), (std::vector<double>{3}));
  EXPECT_EQ(means(2), (std::vector<double>{1.5, 4.5}));
  EXPECT_EQ(means(4), (std::vector<double>{1, 2, 3, 6}));
  EXPECT_EQ(means(8), (std::vector<double>{1, 1, 2, 2, 3, 3, 6, 6}));
  const auto thirds = means(3);  // each is a value and a third of the next or the previous one
  ASSERT_EQ(thirds.size(), 3U);
  EXPECT_DOUBLE_EQ(thirds[0], (1 + 2 / 3.) * 3 / 4);
  EXPECT_DOUBLE_EQ(thirds[1], (2 * 2 / 3. + 3 * 2 / 3.) * 3 / 4);
  EXPECT_DOUBLE_EQ(thirds[2], (3 / 3. + 6) * 3 / 4);
  SplitMix64 random(3);
  for (int round = 0; round < 50; ++round) {
    std::vector<double> values(1 + bounded(random, 40));
    for (double& value : values) value = static_cast<double>(bounded(random, 100));
    const auto parts = means_of_parts(values, 1 + bounded(random, 90));
    EXPECT_NEAR(std::accumulate(parts.begin(), parts.end(), 0.) / static_cast<double>(parts.size()),
                std::accumulate(values.begin(), values.end(), 0.) / static_cast<double>(values.size()), 1e-9);
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
