// Tests the loaders of data-parallel replicas: their shares together are the batches of one loader.
#include <memory>

#include <gtest/gtest.h>

#include "tests/train/training.h"
#include "twobp/data/data.h"
#include "twobp/pipeline/pipeline.h"

namespace twobp::TWOBP_FILE {
namespace {

TEST(LoaderShares, TogetherAreTheBatch) {
  Config config = test::tiny_config();
  const DataSplit data = open_data(config.data, config.model.input(), 3);
  for (const int replicas : {2, 3}) {
    for (const int64_t first_batch : {0, 5}) {
      const int64_t micro_batches = 3;
      LoaderOptions options;
      options.shuffle = true;
      options.seed = 5;
      options.first_batch = first_batch;
      Loader whole(data.train, replicas * micro_batches, 7, options);
      std::vector<std::unique_ptr<Loader>> shares;
      for (int r = 0; r < replicas; ++r) {
        options.replicas = replicas;
        options.replica = r;
        shares.push_back(std::make_unique<Loader>(data.train, micro_batches, 7, options));
        EXPECT_EQ(shares[r]->batches_per_epoch(), whole.batches_per_epoch());
      }
      // This goes past the end of an epoch, whose last batch is short.
      for (int64_t i = 0; i < whole.batches_per_epoch() + 2; ++i) {
        const Batch expected = whole.next();
        std::vector<Fields> together;
        int64_t targets = 0;
        for (const auto& share : shares) {
          Batch batch = share->next();
          targets += batch.targets;
          for (Fields& fields : batch.micro_batches) together.push_back(std::move(fields));
        }
        EXPECT_EQ(targets, expected.targets);
        ASSERT_EQ(together.size(), expected.micro_batches.size()) << i;
        for (size_t m = 0; m < together.size(); ++m) {
          EXPECT_TRUE(at::equal(together[m].at("input_ids"), expected.micro_batches[m].at("input_ids"))) << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
