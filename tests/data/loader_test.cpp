// Tests the loader thread: the order, the last batch of an epoch, how far it reads ahead, errors and the end.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <stdexcept>
#include <thread>

#include <gtest/gtest.h>

#include "tests/train/helpers.h"
#include "twobp/data/data.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_error;

// Sample i is the token i. The data set counts reads, and fails at one sample if asked to.
class Counting : public Dataset {
 public:
  explicit Counting(int64_t size, int64_t fail_at = -1) : size_(size), fail_at_(fail_at) {}
  int64_t size() const override { return size_; }
  Fields read(const std::vector<int64_t>& indices, int64_t /*epoch*/) const override {
    at::Tensor ids = at::empty({static_cast<int64_t>(indices.size()), 1}, at::kLong);
    for (size_t i = 0; i < indices.size(); ++i) {
      if (indices[i] == fail_at_) throw std::runtime_error("sample " + std::to_string(indices[i]) + " is broken");
      ids.data_ptr<int64_t>()[i] = indices[i];
    }
    samples_read += static_cast<int64_t>(indices.size());
    return {{"input_ids", ids}, {"labels", ids}};
  }

  mutable std::atomic<int64_t> samples_read{0};

 private:
  int64_t size_;
  int64_t fail_at_;
};

using Ids = std::vector<std::vector<int64_t>>;  // ids of each micro-batch

Ids ids(const Batch& batch) {
  Ids out;
  for (const auto& fields : batch.micro_batches) {
    const at::Tensor& tensor = fields.at("input_ids");
    out.emplace_back(tensor.data_ptr<int64_t>(), tensor.data_ptr<int64_t>() + tensor.numel());
  }
  return out;
}

TEST(Loader, MakesTheLastBatchOfAnEpochSmaller) {
  Loader loader(std::make_shared<Counting>(9), 3, 2, {.seed = 1});
  EXPECT_EQ(loader.batches_per_epoch(), 2);
  for (int epoch = 0; epoch < 3; ++epoch) {
    EXPECT_EQ(ids(loader.next()), (Ids{{0, 1}, {2, 3}, {4, 5}}));
    const Batch last = loader.next();
    EXPECT_EQ(ids(last), (Ids{{6, 7}, {8}}));
    EXPECT_EQ(last.targets, 3);
    EXPECT_EQ(last.tokens, 3);
  }
}

TEST(Loader, MakesNoSmallerBatchInWholeEpochs) {
  Loader loader(std::make_shared<Counting>(8), 2, 2, {.seed = 1});
  EXPECT_EQ(loader.batches_per_epoch(), 2);
  for (int i = 0; i < 6; ++i) EXPECT_EQ(loader.next().tokens, 4);
}

TEST(Loader, ShufflesEachEpochAnew) {
  const auto data = std::make_shared<Counting>(10);
  Loader loader(data, 2, 2, {.shuffle = true, .seed = 42});
  for (int64_t epoch = 0; epoch < 4; ++epoch) {
    std::vector<int64_t> seen;
    for (int64_t i = 0; i < loader.batches_per_epoch(); ++i) {
      for (const auto& micro_batch : ids(loader.next()))
        seen.insert(seen.end(), micro_batch.begin(), micro_batch.end());
    }
    EXPECT_EQ(seen, epoch_order(10, true, 42, epoch)) << epoch;
  }
}

// It starts at every batch of three epochs, including the short last ones.
TEST(Loader, StartsAtAnyBatchAsIfItHadRunUpToIt) {
  for (const bool shuffle : {false, true}) {
    for (const int64_t size : {1, 3, 4, 9, 10, 11, 12}) {
      const auto data = std::make_shared<Counting>(size);
      Loader whole(data, 2, 2, {.shuffle = shuffle, .seed = 5});
      const int64_t batches = 3 * whole.batches_per_epoch();
      std::vector<Ids> expected;
      for (int64_t i = 0; i < batches + 3; ++i) expected.push_back(ids(whole.next()));
      for (int64_t first = 0; first <= batches; ++first) {
        Loader later(data, 2, 2, {.shuffle = shuffle, .seed = 5, .read_ahead = 2, .first_batch = first});
        EXPECT_EQ(later.batches_per_epoch(), whole.batches_per_epoch());
        for (int64_t i = first; i < first + 3; ++i) {
          EXPECT_EQ(ids(later.next()), expected[static_cast<size_t>(i)]) << size << ' ' << first << ' ' << i;
        }
      }
    }
  }
}

// Samples take different times, so that threads overtake each other.
class Slow : public Dataset {
 public:
  int64_t size() const override { return 57; }
  Fields read(const std::vector<int64_t>& indices, int64_t epoch) const override {
    const int64_t now = ++at_once;
    most_at_once = std::max<int64_t>(most_at_once, now);
    std::this_thread::sleep_for(std::chrono::microseconds(indices.front() * 37 % 11 * 100));
    --at_once;
    at::Tensor ids = at::tensor(indices, at::kLong).unsqueeze(1);
    return {{"input_ids", ids}, {"labels", ids}, {"epoch", at::full({1}, epoch, at::kLong)}};
  }

  mutable std::atomic<int64_t> at_once{0};
  mutable std::atomic<int64_t> most_at_once{0};
};

TEST(Loader, GivesTheSameWithSeveralThreads) {
  Loader one(std::make_shared<Slow>(), 4, 2, {.shuffle = true, .seed = 3});
  const auto data = std::make_shared<Slow>();
  Loader four(data, 4, 2, {.shuffle = true, .seed = 3, .workers = 4});
  for (int64_t i = 0; i < 3 * one.batches_per_epoch(); ++i) {
    const Batch expected = one.next();
    const Batch batch = four.next();
    EXPECT_EQ(ids(batch), ids(expected)) << i;
    EXPECT_EQ(batch.targets, expected.targets);
    for (const auto& fields : batch.micro_batches) {
      EXPECT_EQ(fields.at("epoch").item<int64_t>(), i / one.batches_per_epoch());
    }
  }
  EXPECT_GT(data->most_at_once, 1);
  EXPECT_LE(data->most_at_once, 4);
}

TEST(Loader, ThrowsTheFirstErrorInItsPlaceWithSeveralThreads) {
  for (int i = 0; i < 50; ++i) {
    Loader loader(std::make_shared<Counting>(100, 9), 2, 2, {.seed = 1, .read_ahead = 4, .workers = 3});
    EXPECT_EQ(ids(loader.next()), (Ids{{0, 1}, {2, 3}}));
    EXPECT_EQ(ids(loader.next()), (Ids{{4, 5}, {6, 7}}));
    EXPECT_THROW(loader.next(), std::runtime_error);
    EXPECT_THROW(loader.next(), std::runtime_error);
  }
}

TEST(Loader, ReadsEvaluationsInOrder) {
  Loader loader(std::make_shared<Slow>(), 4, 10, {.shuffle = true, .seed = 3, .workers = 2, .evaluation = true});
  for (int epoch = 0; epoch < 2; ++epoch) {
    const Batch first = loader.next();
    EXPECT_EQ(ids(first)[0], (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
    EXPECT_EQ(first.micro_batches[0].at("epoch").item<int64_t>(), kEvaluation);
    EXPECT_EQ(ids(loader.next()), (Ids{{40, 41, 42, 43, 44, 45, 46, 47, 48, 49}, {50, 51, 52, 53, 54, 55, 56}}));
  }
}

TEST(Loader, StartsLateWithoutReadingEarlierSamples) {
  const auto data = std::make_shared<Counting>(1000, 5);  // reading sample 5 would fail
  Loader loader(data, 2, 2, {.seed = 1, .read_ahead = 1, .first_batch = 100});
  EXPECT_EQ(ids(loader.next()), (Ids{{400, 401}, {402, 403}}));
  EXPECT_LE(data->samples_read, 12);
  Loader far(data, 2, 2, {.shuffle = true, .seed = 1, .read_ahead = 1, .first_batch = int64_t{250} * 1000000007 + 249});
  const auto order = epoch_order(1000, true, 1, 1000000007);
  EXPECT_EQ(ids(far.next()), (Ids{{order[996], order[997]}, {order[998], order[999]}}));
}

TEST(Loader, ReadsAheadAsFarAsToldAndNoFurther) {
  const auto data = std::make_shared<Counting>(1000);
  Loader loader(data, 2, 2, {.seed = 1, .read_ahead = 3});
  const auto settles_at = [&](int64_t samples) {
    for (int i = 0; i < 5000 && data->samples_read < samples; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(30));  // long enough to read hundreds more
    return data->samples_read == samples;
  };
  EXPECT_TRUE(settles_at(12)) << data->samples_read;
  loader.next();
  EXPECT_TRUE(settles_at(16)) << data->samples_read;
}

TEST(Loader, HandsOverTheBatchesBeforeAnErrorThenRepeatsTheError) {
  Loader loader(std::make_shared<Counting>(10, 5), 2, 1, {.seed = 1, .read_ahead = 4});
  EXPECT_EQ(ids(loader.next()), (Ids{{0}, {1}}));
  EXPECT_EQ(ids(loader.next()), (Ids{{2}, {3}}));
  for (int i = 0; i < 2; ++i) {
    try {
      loader.next();
      ADD_FAILURE() << "no error";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "sample 5 is broken");
    }
  }
}

// The thread may be reading, waiting for room, or dead after an error.
TEST(Loader, StopsWhenDestroyed) {
  std::packaged_task<void()> destroy([] {
    for (int i = 0; i < 200; ++i) {
      Loader loader(std::make_shared<Counting>(100, i % 2 == 0 ? 7 : -1), 2, 2, {.shuffle = true, .seed = 1});
      if (i % 3 == 0) loader.next();
      if (i % 5 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  });
  std::future<void> done = destroy.get_future();
  std::thread(std::move(destroy)).detach();  // a thread that hangs could not be joined
  ASSERT_EQ(done.wait_for(std::chrono::seconds(60)), std::future_status::ready) << "it hangs";
  done.get();
}

TEST(Loader, RefusesBadInput) {
  expect_error([] { Loader(nullptr, 1, 1, {.seed = 1}); }, {"no sample"});
  expect_error([] { Loader(std::make_shared<Counting>(0), 1, 1, {.seed = 1}); }, {"no sample"});
  const auto data = std::make_shared<Counting>(4);
  expect_error([&] { Loader(data, 0, 1, {.seed = 1}); }, {"0 micro-batches"});
  expect_error([&] { Loader(data, 1, 0, {.seed = 1}); }, {"of 0 samples"});
  expect_error([&] { Loader(data, 1, 1, {.seed = 1, .read_ahead = 0}); }, {"0 batches ahead"});
  expect_error([&] { Loader(data, 1, 1, {.seed = 1, .read_ahead = 2, .first_batch = -1}); }, {"no batch -1"});
  expect_error([&] { Loader(data, 1, 1, {.workers = 0}); }, {"0 threads"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
