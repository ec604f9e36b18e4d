// Tests the costs of samples, and that batches of unequal ones are balanced, wherever a run resumes.
#include "twobp/data/balance.h"

#include <algorithm>
#include <memory>
#include <numeric>

#include <gtest/gtest.h>

#include "twobp/core/balanced_order.h"

namespace twobp::TWOBP_FILE {
namespace {

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

TEST(CostliestSample, IsTheFirstOfSeveral) {
  EXPECT_EQ(costliest_sample(Priced({1, 9, 5, 9})), 1);
  EXPECT_EQ(costliest_sample(Priced({7, 7, 7})), 0);
}

TEST(RelativeCosts, ArePartsOfAllSamples) {
  EXPECT_EQ(mean_cost(Priced({7, 7, 7})), 0) << "all equal";
  EXPECT_EQ(relative_costs(Priced({7, 7, 7})), std::vector<double>());
  EXPECT_EQ(relative_costs(Priced({})), std::vector<double>());
  EXPECT_EQ(mean_cost(Priced({3, 1, 2})), 2);
  const std::vector<double> two = relative_costs(Priced({3, 1}));
  ASSERT_EQ(two.size(), 64U);
  EXPECT_EQ(two.front(), 0.5);
  EXPECT_EQ(two.back(), 1.5);
  std::vector<int64_t> costs;
  for (int64_t i = 0; i < 1000; ++i) costs.push_back(i * i % 997);
  const std::vector<double> many = relative_costs(Priced(costs));
  EXPECT_TRUE(std::is_sorted(many.begin(), many.end()));
  EXPECT_NEAR(std::accumulate(many.begin(), many.end(), 0.), 64, 1e-9);
}

// Returns the micro-batches of each replica in batch `number`. The loader begins at batch `first`.
std::vector<std::vector<int64_t>> batch_at(const std::shared_ptr<Dataset>& data, int64_t number, int64_t first) {
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
      micro_batches.emplace_back(index.const_data_ptr<int64_t>(), index.const_data_ptr<int64_t>() + index.numel());
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
    const std::vector<int64_t> samples(epoch.begin() + begin, epoch.begin() + std::min<int64_t>(begin + 8, 30));
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
