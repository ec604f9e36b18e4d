// Tests samples of unequal cost: micro-batches and replicas cost about the same, wherever a run resumes.
#include "twobp/data/balance.h"

#include <algorithm>
#include <numeric>
#include <set>

#include <gtest/gtest.h>

#include "twobp/core/random.h"

namespace twobp::TWOBP_FILE {
namespace {

TEST(BalancedOrder, PairsDearSamplesWithCheapOnes) {
  EXPECT_EQ(balanced_order({3, 3, 3, 3}, 2, 1, 2), (std::vector<size_t>{0, 1, 2, 3})) << "nothing to do";
  EXPECT_EQ(balanced_order({9, 8, 1, 2}, 1, 2, 2), (std::vector<size_t>{0, 2, 1, 3}));
  EXPECT_EQ(balanced_order({9, 8, 1, 2}, 2, 2, 1), (std::vector<size_t>{2, 0, 3, 1})) << "replicas";
  EXPECT_EQ(balanced_order({5, 1, 4, 2, 3}, 1, 5, 1), (std::vector<size_t>{1, 4, 0, 2, 3}))
      << "rise and fall";
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

// The only field of a sample is its index.
class Priced : public Dataset {
 public:
  explicit Priced(std::vector<int64_t> costs) : costs_(std::move(costs)) {}
  int64_t size() const override { return static_cast<int64_t>(costs_.size()); }
  Fields read(const std::vector<int64_t>& indices, int64_t /*epoch*/) const override {
    return {{"index", at::tensor(at::ArrayRef<int64_t>(indices))}};
  }
  int64_t cost(int64_t sample) const override { return costs_[static_cast<size_t>(sample)]; }

 private:
  std::vector<int64_t> costs_;
};

TEST(TypicalSamples, AreNearestToTheMean) {
  EXPECT_EQ(typical_samples(Priced({9, 1, 5, 6, 1}), 2), (std::vector<int64_t>{2, 3}));  // the mean is 4.4
  EXPECT_EQ(typical_samples(Priced({7, 7, 7}), 2), (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(typical_samples(Priced({3, 4}), 5), (std::vector<int64_t>{0, 1}));
}

// Returns the micro-batches of each replica in batch `number`. The loader begins at batch `first`.
std::vector<std::vector<int64_t>> batch_at(const std::shared_ptr<Dataset>& data, int64_t number,
                                           int64_t first) {
  std::vector<std::vector<int64_t>> micro_batches;
  for (const int replica : {0, 1}) {
    LoaderOptions options;
    options.shuffle = true;
    options.replicas = 2;
    options.replica = replica;
    options.first_batch = first;
    Loader loader(data, 2, 2, options);
    for (int64_t i = first; i < number; ++i) loader.next();
    for (const Fields& fields : loader.next().micro_batches) {
      const at::Tensor& index = fields.at("index");
      micro_batches.emplace_back(index.const_data_ptr<int64_t>(),
                                 index.const_data_ptr<int64_t>() + index.numel());
    }
  }
  return micro_batches;
}

TEST(Loader, LevelsFullBatchesAndResumesThem) {
  std::vector<int64_t> costs;
  for (int64_t i = 0; i < 30; ++i) costs.push_back(i * i);  // three batches of 8 samples, and one of 6
  const auto data = std::make_shared<Priced>(costs);
  for (int64_t number = 0; number < 8; ++number) {
    const auto batch = batch_at(data, number, 0);
    EXPECT_EQ(batch, batch_at(data, number, number));
    const std::vector<int64_t> epoch = epoch_order(30, true, 0, number / 4);
    const int64_t begin = number % 4 * 8;
    const std::vector<int64_t> samples(epoch.begin() + begin,
                                       epoch.begin() + std::min<int64_t>(begin + 8, 30));
    std::vector<int64_t> all;
    for (const auto& micro_batch : batch) all.insert(all.end(), micro_batch.begin(), micro_batch.end());
    if (samples.size() < 8) {
      EXPECT_EQ(all, samples) << "a batch that is not full stays";
      continue;
    }
    std::vector<int64_t> of_samples;
    for (const int64_t sample : samples) of_samples.push_back(costs[static_cast<size_t>(sample)]);
    std::vector<int64_t> expected;
    for (const size_t i : balanced_order(of_samples, 2, 2, 2)) expected.push_back(samples[i]);
    EXPECT_EQ(all, expected);
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
