// Ranks that take W off each other at the end of a step: who runs it, in which order, the same bits, and what
// becomes of errors.
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "tests/pipeline/support.h"
#include "twobp/core/clock.h"
#include "twobp/pipeline/executor/p2_offers.h"
#include "twobp/pipeline/stage.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::error_of;
using test::expect_contains;
using test::expect_same_bits;
using test::options_of;
using test::random_batch;
using test::small_llama;
using test::take_gradients;

constexpr int kMicroBatches = 4;

StepInput stealing() {
  StepInput options = test::step_input();
  options.p2_stealing = true;
  return options;
}

// Rank 0 has two layers whose W the test sees; rank 1 has nothing of the kind.
class P2Stealing : public ::testing::Test {
 protected:
  P2Stealing() {
    for (const int i : {0, 1}) {
      test::insert_probe(model_, 1 + i)->backward_p2 = [this, i](int64_t micro_batch) {
        on_w(i, micro_batch);
      };
    }
  }
  std::unique_ptr<Pipeline> pipeline() const {
    const auto layers = static_cast<int>(model_.layers.size());
    return std::make_unique<Pipeline>(model_, test::no_costs(model_), options_of({layers - 2, 2}));
  }
  static StepSetup setup_of(const Pipeline& pipeline) {
    return pipeline.setup("gpipe", kMicroBatches, P2Policy::kEnd, P2Batching::kLoop, MemoryCap::none());
  }
  // Waits until units of both layers are under way at once, on two threads.
  void meet(int probe) {
    std::unique_lock lock(mutex_);
    at_work_.insert(probe);
    both_.notify_all();
    met_ = both_.wait_for(lock, std::chrono::seconds(20), [&] { return at_work_.size() == 2; }) && met_;
  }
  void on_w(int probe, int64_t micro_batch) {
    {
      const std::lock_guard lock(mutex_);
      order_[probe].push_back(micro_batch);
      threads_.insert(std::this_thread::get_id());
    }
    if (hook_) hook_(probe, micro_batch);
  }

  ModelSpec model_ = small_llama(2);
  std::function<void(int probe, int64_t micro_batch)> hook_;
  std::mutex mutex_;
  std::condition_variable both_;
  std::set<int> at_work_;
  bool met_ = true;
  std::map<int, std::vector<int64_t>> order_;  // by probe
  std::set<std::thread::id> threads_;
};

TEST_F(P2Stealing, ARankThatHasEndedItsPartRunsWhatAnotherHasLeft) {
  hook_ = [this](int probe, int64_t) { meet(probe); };
  const auto pipeline = this->pipeline();
  const StepReport report = pipeline->run(setup_of(*pipeline), random_batch(kMicroBatches), stealing());
  EXPECT_TRUE(met_);
  EXPECT_EQ(threads_.size(), 2u);
  const std::vector<int64_t> in_order = {0, 1, 2, 3};
  for (const auto& [probe, micro_batches] : order_) EXPECT_EQ(micro_batches, in_order) << "probe " << probe;
  // What a stage has cost is its own, wherever it ran; a rank was busy with what it ran.
  double busy = 0;
  for (const StageTimes& stage : report.stages) busy += stage.forward + stage.backward_p1 + stage.backward_p2;
  EXPECT_NEAR(report.ranks[0].busy + report.ranks[1].busy, busy, 1e-9);
}

TEST_F(P2Stealing, IsOnlyDoneWhereItIsAskedFor) {
  const auto pipeline = this->pipeline();
  const StepSetup setup = setup_of(*pipeline);
  pipeline->run(setup, random_batch(kMicroBatches), test::step_input());
  StepInput traced = stealing();
  traced.want_events = true;  // a trace shows the schedule
  pipeline->run(setup, random_batch(kMicroBatches), traced);
  EXPECT_EQ(threads_.size(), 1u);
}

TEST_F(P2Stealing, AnErrorInWhatWasTakenIsItsOwnersError) {
  std::thread::id owner;
  hook_ = [&](int probe, int64_t) {
    meet(probe);
    const std::lock_guard lock(mutex_);
    if (std::this_thread::get_id() != owner) throw std::runtime_error("out of luck");
  };
  const auto pipeline = this->pipeline();
  pipeline->on_ranks([&](int rank) {
    if (rank == 0) owner = std::this_thread::get_id();
  });
  const StepSetup setup = setup_of(*pipeline);
  expect_contains(error_of([&] { pipeline->run(setup, random_batch(kMicroBatches), stealing()); }),
                  {"rank 0, step 5, 0W", "out of luck"});
  EXPECT_EQ(threads_.size(), 2u);
  expect_contains(error_of([&] { pipeline->run(setup, random_batch(kMicroBatches), stealing()); }),
                  {"failed in an earlier step"});
}

TEST_F(P2Stealing, AnErrorOfTheOwnerEndsTheWaitOfTheOthers) {
  std::thread::id owner;
  bool thrown = false;
  hook_ = [&](int, int64_t) {
    std::unique_lock lock(mutex_);
    if (std::this_thread::get_id() == owner) {
      thrown = true;
      both_.notify_all();
      throw std::runtime_error("out of luck");
    }
    both_.wait_for(lock, std::chrono::seconds(20), [&] { return thrown; });
  };
  const auto pipeline = this->pipeline();
  pipeline->on_ranks([&](int rank) {
    if (rank == 0) owner = std::this_thread::get_id();
  });
  const double begin = now_seconds();
  expect_contains(
      error_of([&] { pipeline->run(setup_of(*pipeline), random_batch(kMicroBatches), stealing()); }),
      {"rank 0, step 5, 0W", "out of luck"});
  EXPECT_LT(now_seconds() - begin, 10);
}

TEST(P2StealingErrors, BeforeTheEndReachWhoWaitsThere) {
  ModelSpec model = small_llama(2);
  test::insert_probe(model, 1)->backward_p1 = [](const Context& context) {
    if (context.micro_batch == 2) throw std::runtime_error("out of luck");
  };
  Pipeline broken(model, test::no_costs(model), options_of({5, 2}));
  const double begin = now_seconds();
  const StepSetup setup = broken.setup("gpipe", kMicroBatches, P2Policy::kEnd);
  expect_contains(error_of([&] { broken.run(setup, random_batch(kMicroBatches), stealing()); }),
                  {"rank 0, step 5, 0I2", "out of luck"});
  EXPECT_LT(now_seconds() - begin, 10);
}

TEST_F(P2Stealing, AStuckRankRunsIntoTheTimeOut) {
  hook_ = [](int probe, int64_t) {
    if (probe == 0) std::this_thread::sleep_for(std::chrono::milliseconds(800));
  };
  const auto pipeline = this->pipeline();
  StepInput options = stealing();
  options.timeout = 0.2;
  expect_contains(error_of([&] { pipeline->run(setup_of(*pipeline), random_batch(kMicroBatches), options); }),
                  {"step 5", "waited 0.2 s", "weight gradients", "pipeline.timeout"});
}

TEST_F(P2Stealing, HasThePipelineForItself) {
  const auto pipeline = this->pipeline();
  const StepSetup setup = setup_of(*pipeline);
  pipeline->submit(setup, random_batch(kMicroBatches), test::step_input());
  expect_contains(error_of([&] { pipeline->submit(setup, random_batch(kMicroBatches), stealing()); }),
                  {"has the pipeline for itself"});
  pipeline->finish();
}

TEST(P2StealingBits, AreThoseOfOneStage) {
  const ModelSpec model = small_llama(3);  // 8 layers
  const auto run = [&](const PipelineOptions& options, const char* schedule, P2Policy policy,
                       const StepInput& step) {
    Pipeline pipeline(model, test::no_costs(model), options);
    const StepSetup setup =
        pipeline.setup(schedule, kMicroBatches, policy, P2Batching::kLoop, MemoryCap::automatic());
    const double loss = pipeline.run(setup, random_batch(kMicroBatches), step).loss;
    return std::pair(loss, take_gradients(pipeline));
  };
  const auto [loss, gradients] = run(options_of({8}), "gpipe", P2Policy::kOff, test::step_input());
  for (const auto& [schedule, split, ranks] :
       std::vector<std::tuple<const char*, std::vector<int>, std::vector<int>>>{
           {"gpipe", {3, 2, 3}, {}},
           {"1f1b", {6, 2}, {}},
           {"zb-h1", {2, 2, 2, 2}, {}},
           {"zb-v", {2, 1, 3, 2}, {0, 1, 1, 0}}}) {
    for (const P2Policy policy : {P2Policy::kOff, P2Policy::kEnd, P2Policy::kCooldown, P2Policy::kFill}) {
      for (int repeat = 0; repeat < 5; ++repeat) {  // who takes what differs from run to run
        SCOPED_TRACE(concat(schedule, ", ", policy_name(policy)));
        const auto [actual_loss, actual] = run(options_of(split, ranks), schedule, policy, stealing());
        EXPECT_EQ(loss, actual_loss);
        expect_same_bits(gradients, actual);
      }
    }
  }
}

TEST(P2Offers, NobodyTakesWhatThereIsNoRoomFor) {
  struct Leaf : Layer {
    Values forward(Values x, Context&, Saved&) override { return x; }
    Values backward_p1(Values dy, Context&, Saved&) override { return dy; }
  } leaves[3];
  Saved saved;
  std::vector<OfferedP2> units;
  for (Leaf& leaf : leaves) units.push_back({{&leaf, &saved}, 0, 0});
  P2Offers offers(2);
  offers.begin_step();
  std::set<int64_t> asked;
  int taken = 0;
  std::thread helper([&] {
    offers.run_own(
        1, {}, 0, [](const OfferedP2&) { return P2Offers::Spent(); }, 20);
    const auto has_room = [&](int owner, int64_t bytes) {
      EXPECT_EQ(owner, 0);
      asked.insert(bytes);
      return false;
    };
    const auto take = [&](const OfferedP2&) {
      ++taken;
      return P2Offers::Spent();
    };
    offers.help(1, has_room, take, 20);
  });
  int own = 0;
  const auto run = [&](const OfferedP2&) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ++own;
    return P2Offers::Spent();
  };
  offers.run_own(0, units, 123, run, 20);
  helper.join();
  EXPECT_EQ(own, 3);
  EXPECT_EQ(taken, 0);
  EXPECT_EQ(asked, std::set<int64_t>{2 * 123}) << "its owner's unit and one beside it";
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
