// Tests the meter alone: the category of each tensor, the time when it is no longer counted, and the peaks.
#include "twobp/pipeline/memory/memory_meter.h"

#include <numeric>
#include <thread>

#include "tests/pipeline/support.h"

namespace twobp::TWOBP_FILE {
namespace {

using Category = MemoryCategory;

int64_t now(const MemoryMeter& meter, int stage, Category category) {
  return meter.stage_use(stage).now[static_cast<int>(category)];
}

at::Tensor floats(int64_t n) {
  return at::empty({n}, at::kFloat);
}

// Runs `body` on a watched thread. The threads of ranks are watched.
void on_watched_thread(const MemoryMeter& meter, const std::function<void()>& body) {
  std::thread([&] {
    const MemoryMeter::Watch watch(meter);
    body();
  }).join();
}

TEST(MemoryMeter, CountsInTheScopeOfTheThread) {
  MemoryMeter meter({0, 0, 1});
  on_watched_thread(meter, [&] {
    const at::Tensor nobodys = floats(1000);
    at::Tensor a, b, c;
    {
      const MemoryMeter::Scope scope(0, Category::kParameters);
      a = floats(100);
      {
        const MemoryMeter::Scope inner(2, Category::kStash);
        b = floats(30);
      }
      c = floats(5);  // the outer scope again
    }
    const at::Tensor nobodys_either = floats(1000);
    EXPECT_EQ(now(meter, 0, Category::kParameters), 420);
    EXPECT_EQ(now(meter, 2, Category::kStash), 120);
    EXPECT_EQ(meter.stage_use(0).total(), 420);
    EXPECT_EQ(meter.stage_use(1).total(), 0);
    EXPECT_EQ(meter.rank_use(0).total(), 420);
    EXPECT_EQ(meter.rank_use(1).total(), 120);
    EXPECT_EQ(meter.held(0), 0) << "parameters are the model's own";
    EXPECT_EQ(meter.held(1), 120);
    c.reset();
    EXPECT_EQ(now(meter, 0, Category::kParameters), 400);
  });
  for (int stage : {0, 1, 2}) EXPECT_EQ(meter.stage_use(stage).total(), 0) << "all were released";
}

TEST(MemoryMeter, IgnoresUnwatchedThreads) {
  MemoryMeter meter({0});
  const MemoryMeter::Scope scope(0, Category::kActivations);
  const at::Tensor tensor = floats(100);
  EXPECT_EQ(meter.stage_use(0).total(), 0);
}

// A view holds the same memory, which is released with the last view.
TEST(MemoryMeter, CountsViewsAsOneAllocation) {
  MemoryMeter meter({0});
  on_watched_thread(meter, [&] {
    const MemoryMeter::Scope scope(0, Category::kActivations);
    at::Tensor tensor = floats(100);
    at::Tensor view = tensor.view({10, 10}).narrow(0, 3, 2);
    EXPECT_EQ(meter.held(0), 400);
    tensor.reset();
    EXPECT_EQ(meter.held(0), 400);
    view.reset();
    EXPECT_EQ(meter.held(0), 0);
  });
}

TEST(MemoryMeter, MovesTensorsOverABoundaryAndIntoTheStash) {
  MemoryMeter meter({0, 1});
  on_watched_thread(meter, [&] {
    at::Tensor tensor;
    {
      const MemoryMeter::Scope scope(0, Category::kActivations);
      tensor = floats(50);
    }
    meter.rebook(tensor, 1, Category::kActivations);
    EXPECT_EQ(meter.held(0), 0);
    EXPECT_EQ(meter.held(1), 200);
    meter.rebook(tensor.view({5, 10}), 1, Category::kStash);  // a view stands for its memory
    EXPECT_EQ(now(meter, 1, Category::kActivations), 0);
    EXPECT_EQ(now(meter, 1, Category::kStash), 200);
    EXPECT_EQ(meter.held(1), 200);
    meter.rebook(at::Tensor(), 1, Category::kStash);  // an undefined tensor has no memory
    tensor.reset();
    EXPECT_EQ(meter.rank_use(1).total(), 0);
  });
}

// Memory that is not counted (a batch from the loader) stays uncounted when it is rebooked.
TEST(MemoryMeter, RebookingUncountedMemoryDoesNothing) {
  MemoryMeter meter({0});
  at::Tensor batch = floats(100);
  on_watched_thread(meter, [&] { meter.rebook(batch, 0, Category::kStash); });
  EXPECT_EQ(meter.stage_use(0).total(), 0);
}

TEST(MemoryMeter, CountsAReleaseWhereTheTensorWasAllocated) {
  MemoryMeter meter({0, 1});
  at::Tensor tensor;
  on_watched_thread(meter, [&] {
    const MemoryMeter::Scope scope(0, Category::kActivations);
    tensor = floats(100);
  });
  EXPECT_EQ(meter.held(0), 400);
  on_watched_thread(meter, [&] {
    const MemoryMeter::Scope scope(1, Category::kStash);  // the scope of the other thread has no effect
    tensor.reset();
  });
  EXPECT_EQ(meter.held(0), 0);
  EXPECT_EQ(meter.held(1), 0);
  EXPECT_EQ(meter.stage_use(1).total(), 0);
}

TEST(MemoryMeter, GivesPeaksAndTheirSplit) {
  MemoryMeter meter({0, 0});
  on_watched_thread(meter, [&] {
    const MemoryMeter::Scope parameters(0, Category::kParameters);
    const at::Tensor weight = floats(10);
    {
      const MemoryMeter::Scope scope(0, Category::kActivations);
      const at::Tensor activation = floats(100);
      const MemoryMeter::Scope other(1, Category::kStash);
      const at::Tensor stash = floats(20);
    }
    const at::Tensor more = floats(5);
    const MemoryUse use = meter.stage_use(0);
    EXPECT_EQ(use.total(), 60);
    EXPECT_EQ(use.peak, 440);
    EXPECT_EQ(use.at_peak[static_cast<int>(Category::kParameters)], 40);
    EXPECT_EQ(use.at_peak[static_cast<int>(Category::kActivations)], 400);
    EXPECT_EQ(meter.rank_use(0).peak, 520) << "a rank's peak is the peak of the sum of its stages";
    EXPECT_EQ(std::accumulate(use.at_peak.begin(), use.at_peak.end(), int64_t{0}), use.peak);

    meter.reset_peaks();
    EXPECT_EQ(meter.stage_use(0).peak, 60);
    EXPECT_EQ(meter.rank_use(0).peak, 60);
  });
}

TEST(MemoryMeter, RestartsTheHighWaterMarkWhenItIsTaken) {
  MemoryMeter meter({0});
  on_watched_thread(meter, [&] {
    const MemoryMeter::Scope scope(0, Category::kActivations);
    const at::Tensor stays = floats(10);
    { const at::Tensor passes = floats(100); }
    EXPECT_EQ(meter.take_high_water(0), 440);
    EXPECT_EQ(meter.take_high_water(0), 40);
    { const at::Tensor passes = floats(1); }
    EXPECT_EQ(meter.take_high_water(0), 44);
  });
}

// Two threads, each on its own rank, release each other's tensors at the same time.
TEST(MemoryMeter, CountsExactlyWithConcurrentThreads) {
  MemoryMeter meter({0, 1});
  std::vector<at::Tensor> crossing(200);
  const auto work = [&](int stage) {
    const MemoryMeter::Watch watch(meter);
    const MemoryMeter::Scope scope(stage, Category::kActivations);
    for (size_t i = stage; i < crossing.size(); i += 2) {
      crossing[i] = floats(static_cast<int64_t>(i) + 1);
      const at::Tensor scratch = floats(64);
    }
  };
  std::thread first(work, 0);
  std::thread second(work, 1);
  first.join();
  second.join();
  // The sums are 1 + 3 + ... + 199, and 2 + 4 + ... + 200.
  EXPECT_EQ(meter.held(0), 4 * 100 * 100);
  EXPECT_EQ(meter.held(1), 4 * 100 * 101);
  on_watched_thread(meter, [&] { crossing.clear(); });
  EXPECT_EQ(meter.held(0), 0);
  EXPECT_EQ(meter.held(1), 0);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
