// Tests two steps that run at the same time: the work that a rank may do before the others have ended a step, and the
// handling of errors.
#include <chrono>
#include <future>

#include <gtest/gtest.h>

#include "tests/pipeline/support.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_contains;
using test::options_of;
using test::random_batch;
using test::small_mlp;

StepRequest step_request(int64_t step) {
  StepRequest options = test::step_request();
  options.step = step;
  return options;
}

class RunAhead : public ::testing::Test {
 protected:
  RunAhead() : model_(small_mlp(4)), pipeline_(model_, test::no_costs(model_), options_of({2, 2})) {}

  ModelSpec model_;
  Pipeline pipeline_;
};

TEST_F(RunAhead, ARankDoesNotWaitForTheOthersToEndTheStep) {
  const StepPlan plan = pipeline_.forward_plan(2);
  std::promise<void> first_rank_is_ahead;
  std::future<void> ahead = first_rank_is_ahead.get_future();
  bool was_ahead = false;
  StepRequest first = step_request(1);
  first.update = test::update_by([&](int rank) {
    if (rank == 1) was_ahead = ahead.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
    return std::vector<Waited>();
  });
  StepRequest second = step_request(2);
  second.update = test::update_by([&](int rank) {
    if (rank == 0) first_rank_is_ahead.set_value();
    return std::vector<Waited>();
  });
  for (StepRequest* options : {&first, &second}) options->training = false;
  pipeline_.submit(plan, random_batch(2), first);
  pipeline_.submit(plan, random_batch(2), second);
  EXPECT_EQ(pipeline_.under_way(), 2);
  EXPECT_EQ(pipeline_.finish().step, 1);
  EXPECT_TRUE(was_ahead);
  EXPECT_EQ(pipeline_.finish().step, 2);
  EXPECT_EQ(pipeline_.under_way(), 0);
}

TEST_F(RunAhead, AnErrorEndsAllRunningSteps) {
  const StepPlan plan = pipeline_.plan("1f1b", 3, P2Policy::kFill);
  for (const int64_t broken : {1, 2}) {
    Pipeline pipeline(model_, test::no_costs(model_), options_of({2, 2}));
    for (const int64_t step : {1, 2}) {
      StepRequest options = step_request(step);
      options.update = test::update_by([=](int rank) {
        if (rank == 1 && step == broken) fail("no update today");
        return std::vector<Waited>();
      });
      pipeline.submit(plan, random_batch(3), options);
    }
    expect_contains(test::error_of([&] {
                      pipeline.finish();
                      pipeline.finish();
                    }),
                    {concat("step ", broken), "no update today"});
    EXPECT_EQ(pipeline.under_way(), 0);
    expect_contains(test::error_of([&] { pipeline.submit(plan, random_batch(3), step_request(3)); }),
                    {"failed in an earlier step"});
    // The remaining memory is messages in a mailbox, at most one output or gradient of each micro-batch.
    const int64_t messages = 2 * 3 * test::kRows * test::kDim * test::kFloat;
    for (int rank = 0; rank < 2; ++rank) EXPECT_LE(pipeline.meter().held(rank), messages) << "rank " << rank;
  }
}

TEST_F(RunAhead, RunningStepsEndBeforeThePipeline) {
  auto pipeline = std::make_unique<Pipeline>(model_, test::no_costs(model_), options_of({4}));
  const StepPlan plan = pipeline->plan("1f1b", 3, P2Policy::kFill);
  int ended = 0;
  const auto submit = [&](int64_t step) {
    StepRequest options = step_request(step);
    options.update = test::update_by([&](int) {
      ++ended;
      return std::vector<Waited>();
    });
    pipeline->submit(plan, random_batch(3), options);
  };
  submit(1);
  submit(2);
  pipeline->drain();
  EXPECT_EQ(ended, 2);
  EXPECT_EQ(pipeline->under_way(), 0);
  submit(3);
  pipeline.reset();
  EXPECT_EQ(ended, 3);
}

TEST_F(RunAhead, RefusesCallsThatNeedAnIdlePipeline) {
  const StepPlan plan = pipeline_.plan("1f1b", 2, P2Policy::kFill);
  EXPECT_THROW(pipeline_.finish(), Error);
  pipeline_.submit(plan, random_batch(2), step_request(1));
  StepRequest traced = step_request(2);
  traced.want_events = true;
  expect_contains(test::error_of([&] { pipeline_.submit(plan, random_batch(2), traced); }),
                  {"events", "cannot overlap another step"});
  expect_contains(test::error_of([&] { pipeline_.run(plan, random_batch(2), step_request(2)); }), {"still running"});
  EXPECT_EQ(pipeline_.finish().step, 1);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
