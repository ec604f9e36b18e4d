// Tests the executor on handmade placements and schedules. Its results do not depend on which rank owns a stage. `fill`
// runs W in the waits and nowhere else. The reported times add up to the step.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <thread>
#include <utility>

#include "tests/pipeline/support.h"
#include "twobp/models/freeze.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_same_bits;
using test::finished;
using test::options_of;
using test::random_batch;
using test::small_llama;
using test::step_request;
using test::take_gradients;

const std::vector<P2Policy> kPolicies = {P2Policy::kOff, P2Policy::kEnd, P2Policy::kCooldown, P2Policy::kFill};

struct Result {
  double loss = 0;
  std::vector<at::Tensor> gradients;
};

Result run(const ModelSpec& model, const PipelineOptions& options, const Schedule& schedule) {
  Pipeline pipeline(model, test::no_costs(model), options);
  const StepPlan plan = pipeline.plan(schedule, {P2Batching::kLoop, 0});
  Result result;
  result.loss = pipeline.run(plan, random_batch(schedule.micro_batches), step_request()).loss;
  result.gradients = take_gradients(pipeline);
  return result;
}

Result one_stage(const ModelSpec& model, int micro_batches) {
  const auto layers = static_cast<int>(model.layers.size());
  return run(model, options_of({layers}), make_schedule("gpipe", 1, micro_batches, P2Policy::kOff));
}

// Four stages run on two ranks. F and B are placed by hand.
Schedule four_stages(std::vector<int> rank_of_stage, int micro_batches, std::vector<std::vector<Instruction>> ranks) {
  Schedule schedule;
  schedule.name = "by hand";
  schedule.stages = 4;
  schedule.micro_batches = micro_batches;
  schedule.rank_of_stage = std::move(rank_of_stage);
  schedule.ranks = std::move(ranks);
  return schedule;
}

constexpr Op F = Op::kForward;
constexpr Op B = Op::kBackward;
constexpr Op I = Op::kBackwardP1;
constexpr Op W = Op::kBackwardP2;

TEST(Executor, RunsAllStagesOnOneRank) {
  const ModelSpec model = small_llama(3);
  const Result expected = one_stage(model, 2);
  std::vector<Instruction> list;
  for (const int stage : {0, 1, 2, 3}) {
    for (const int m : {0, 1}) list.push_back({F, stage, m});
  }
  for (const int stage : {3, 2, 1, 0}) {
    for (const int m : {0, 1}) list.push_back({B, stage, m});
  }
  const Schedule schedule = four_stages({0, 0, 0, 0}, 2, {list});
  for (const P2Policy policy : kPolicies) {
    const Result actual = run(model, options_of({2, 1, 3, 2}, {0, 0, 0, 0}), finished(schedule, policy));
    EXPECT_EQ(expected.loss, actual.loss);
    expect_same_bits(expected.gradients, actual.gradients);
  }
}

// A chain of frozen layers, whose stages lie beside those of the trained layers.
TEST(Executor, FrozenStagesLeaveTheSameBits) {
  ModelSpec model = small_llama(4);  // 10 layers
  freeze(model, {"model.embed_tokens.weight", "model.layers.0.*", "model.layers.1.*"});
  ASSERT_EQ(model.first_trainable, 5);
  constexpr int kMicroBatches = 6;
  const Result expected = one_stage(model, kMicroBatches);
  EXPECT_FALSE(expected.gradients.empty());
  int runs = 0;
  for (const std::string& name : schedule_names()) {
    for (const P2Policy policy : policies_of(name)) {
      for (const int ranks : {1, 2}) {
        const int stages = ranks * usual_stages_per_rank(named_schedule(name).placement);
        if (!admits(name, stages, ranks, kMicroBatches)) continue;
        std::vector<int> split = ranks == 1 ? std::vector<int>{5} : std::vector<int>{2, 3};
        for (int stage = 0; stage < stages; ++stage) split.push_back(stage == 0 ? 6 - stages : 1);
        std::vector<int> rank_of_stage = place_stages(named_schedule(name).placement, stages, ranks);
        for (int rank = ranks; rank-- > 0;) rank_of_stage.insert(rank_of_stage.begin(), rank);
        PipelineOptions options = options_of(split, rank_of_stage);
        options.frozen_stages = true;
        Pipeline pipeline(model, test::no_costs(model), options);
        const StepPlan plan = pipeline.plan(ScheduleSource(name), kMicroBatches, policy, {P2Batching::kLoop, 0});
        EXPECT_EQ(plan.schedule.frozen, ranks);
        EXPECT_EQ(pipeline.run(plan, random_batch(kMicroBatches), step_request()).loss, expected.loss);
        expect_same_bits(expected.gradients, take_gradients(pipeline));
        ++runs;
      }
    }
  }
  EXPECT_GT(runs, 100);
  PipelineOptions options = options_of({3, 3, 2, 2}, {0, 1, 0, 1});
  options.frozen_stages = true;
  test::expect_error([&] { Pipeline pipeline(model, test::no_costs(model), options); }, {"have trained layers"});
}

// Steps that know the next batch run F of frozen stages for it. Each F runs once, unless the batch is another one or
// weights may have changed.
TEST(Executor, ForwardsAheadLeaveTheSameBits) {
  ModelSpec model = small_llama(4);  // 10 layers
  freeze(model, {"model.embed_tokens.weight", "model.layers.0.*", "model.layers.1.*"});
  std::array<std::map<std::pair<int64_t, int64_t>, int>, 2> calls;  // by stage; by step and micro-batch
  for (const int stage : {0, 1}) {
    test::insert_probe(model, 1 + 3 * stage)->forward = [&of_stage = calls[stage]](const Context& context) {
      if (context.training) ++of_stage[{context.step, context.micro_batch}];
    };
    ++model.first_trainable;
  }
  PipelineOptions options = options_of({3, 4, 3, 2}, {0, 1, 0, 1});
  options.frozen_stages = true;
  constexpr int kMicroBatches = 3;
  const auto batch_of = [](int64_t step) {
    std::vector<Fields> batch;
    for (int m = 0; m < kMicroBatches; ++m) batch.push_back(test::random_fields(100 * step + m));
    return batch;
  };
  Pipeline plain(model, test::no_costs(model), options);
  Pipeline pipeline(model, test::no_costs(model), options);
  for (const P2Policy policy : {P2Policy::kFill, P2Policy::kOff}) {
    StepPlan plan = pipeline.plan("1f1b", kMicroBatches, policy, {P2Batching::kLoop, 0});
    EXPECT_EQ(plan.ahead, 0) << "nothing costs anything";
    std::map<int64_t, double> losses;
    std::map<int64_t, std::vector<at::Tensor>> gradients;
    for (int64_t step = 1; step <= 6; ++step) {
      StepRequest request = step_request();
      request.step = step;
      losses[step] = plain.run(plan, batch_of(step), request).loss;
      gradients[step] = take_gradients(plain);
    }
    calls = {};
    plan.ahead = 2;  // of the second stage 1
    for (int64_t step = 1; step <= 6; ++step) {
      StepRequest request = step_request();
      request.step = step;
      request.next = batch_of(step == 3 ? 9 : step + 1);  // before step 4, another one
      if (step == 6) request.next.clear();
      EXPECT_EQ(pipeline.run(plan, batch_of(step), request).loss, losses[step]);
      expect_same_bits(gradients[step], take_gradients(pipeline));
      for (const int stage : {0, 1})
        EXPECT_EQ(calls[stage].size(), kMicroBatches * step + (step < 6 ? 2 - stage : 0)) << "those of the next step";
      if (step == 4) pipeline.on_ranks([](int) {});
      if (step == 1) {
        request.training = false;
        pipeline.run(pipeline.forward_plan(kMicroBatches), batch_of(7), request);
      }
    }
    for (const int stage : {0, 1}) {
      for (const auto& [at, count] : calls[stage])
        EXPECT_EQ(count, (at.first == 4 || at.first == 5) && at.second < 2 - stage ? 2 : 1) << at.first << at.second;
    }
  }
}

TEST(Executor, AnErrorAheadNamesItsStep) {
  ModelSpec model = small_llama(4);
  freeze(model, {"model.embed_tokens.weight", "model.layers.0.*", "model.layers.1.*"});
  test::insert_probe(model, 1)->forward = [](const Context& context) { TWOBP_CHECK(context.step != 2, "it fails"); };
  ++model.first_trainable;
  PipelineOptions options = options_of({3, 3, 3, 2}, {0, 1, 0, 1});
  options.frozen_stages = true;
  Pipeline pipeline(model, test::no_costs(model), options);
  StepPlan plan = pipeline.plan("1f1b", 2, P2Policy::kFill, {P2Batching::kLoop, 0});
  plan.ahead = 1;
  StepRequest request = step_request();
  request.step = 1;
  request.next = random_batch(2);
  test::expect_error([&] { pipeline.run(plan, random_batch(2), request); },
                     {"rank 0, step 1", "micro-batch 0 of step 2: stage 0, layer probe before 1: it fails"});
}

// A step that is given up leaves no F and no message for the same step when it comes again.
TEST(Executor, ForwardsAheadOfAStepThatIsGivenUp) {
  ModelSpec model = small_llama(4);
  freeze(model, {"model.embed_tokens.weight", "model.layers.0.*", "model.layers.1.*"});
  PipelineOptions options = options_of({3, 2, 3, 2}, {0, 1, 0, 1});
  options.frozen_stages = true;
  Pipeline plain(model, test::no_costs(model), options);
  Pipeline pipeline(model, test::no_costs(model), options);
  StepPlan plan = pipeline.plan("1f1b", 2, P2Policy::kFill, {P2Batching::kLoop, 0});
  const auto step = [&](Pipeline& of, int64_t number, std::function<bool()> asked) {
    StepRequest request = step_request();
    request.step = number;
    request.next = random_batch(2);
    request.update = test::update_by([](int) { return std::vector<Waited>(); });
    if (asked) request.early_end = std::make_shared<EarlyEnd>(std::move(asked), /*may_give_up=*/true);
    return of.run(plan, random_batch(2), request);
  };
  const double loss = step(plain, 2, {}).loss;
  const std::vector<at::Tensor> gradients = take_gradients(plain);
  plan.ahead = 2;
  int given_up = 0;
  for (int after = 0; after < 60; ++after) {  // looks of either rank
    std::atomic<int> looks = 0;
    const bool up = step(pipeline, 1, [&] { return looks++ >= after; }).given_up;
    given_up += up ? 1 : 0;
    if (!up) take_gradients(pipeline);
    EXPECT_EQ(step(pipeline, 2, {}).loss, loss);
    expect_same_bits(gradients, take_gradients(pipeline));
  }
  EXPECT_GT(given_up, 10);
}

// The schedule itself places W between other ops, as single units and as a range. F, I and messages are ranges too.
TEST(Executor, FollowsPlacedWAndRanges) {
  const ModelSpec model = small_llama(1);  // 4 layers
  const Result expected = one_stage(model, 3);
  Schedule schedule;
  schedule.name = "ranges";
  schedule.stages = 2;
  schedule.micro_batches = 3;
  schedule.rank_of_stage = {0, 1};
  schedule.ranks = {{{F, 0, 0, 2}, {F, 0, 2}, {I, 0, 0}, {I, 0, 1, 2}, {W, 0, 0}, {W, 0, 1, 2}},
                    {{F, 1, 0, 3}, {I, 1, 0}, {W, 1, 0}, {B, 1, 1}, {I, 1, 2}, {W, 1, 2}}};
  schedule = add_communication(schedule);
  validate(schedule);
  const Result actual = run(model, options_of({2, 2}), schedule);
  EXPECT_EQ(expected.loss, actual.loss);
  expect_same_bits(expected.gradients, actual.gradients);
}

TEST(Executor, RefusesAScheduleForOtherStagesOrBatches) {
  const ModelSpec model = small_llama(1);
  Pipeline pipeline(model, test::no_costs(model), options_of({2, 2}));
  EXPECT_NE(test::error_of([&] {
              pipeline.run(pipeline.plan("1f1b", 3, P2Policy::kFill), random_batch(2), {});
            }).find("3 micro-batches, but the batch has 2"),
            std::string::npos);
  const StepPlan plan = pipeline.plan(make_schedule("1f1b", 4, 2, P2Policy::kFill), {P2Batching::kLoop, 0});
  test::expect_contains(test::error_of([&] { pipeline.run(plan, random_batch(2), {}); }), {"places its stages"});
  // Neither error has damaged the pipeline.
  pipeline.run(pipeline.plan("1f1b", 2, P2Policy::kFill), random_batch(2), step_request());
}

// The accounts only watch the loop.
TEST(Executor, HasTheSameBitsWithoutAccounts) {
  const ModelSpec model = small_llama(3);
  for (const char* schedule : {"1f1b", "gpipe", "zb-h1"}) {
    for (const P2Policy policy : {P2Policy::kOff, P2Policy::kEnd, P2Policy::kFill}) {
      std::vector<Result> results;
      for (const bool accounts : {true, false}) {
        PipelineOptions options = options_of({3, 3, 2});
        options.accounts = accounts;
        Pipeline pipeline(model, test::no_costs(model), options);
        Result& result = results.emplace_back();
        for (const int64_t cap : {0, 1}) {  // with a cap of 1, W makes room
          const StepPlan plan = pipeline.plan(schedule, 4, policy, {P2Batching::kLoop, cap});
          const StepReport report = pipeline.run(plan, random_batch(4), step_request());
          EXPECT_EQ(report.timed(), accounts);
          result.loss += report.loss;
        }
        result.gradients = take_gradients(pipeline);
      }
      EXPECT_EQ(results[0].loss, results[1].loss);
      expect_same_bits(results[0].gradients, results[1].gradients);
    }
  }
}

using Milliseconds = std::chrono::milliseconds;

void sleep_for(int ms) {
  std::this_thread::sleep_for(Milliseconds(ms));
}

// Stage 0 is fast and has W to run. Stage 1 is slow, so stage 0 waits for it before every I.
class Waiting : public ::testing::Test {
 protected:
  Waiting() : model_(small_llama(2)) {
    slow_ = test::insert_probe(model_, 3);
    slow_->forward = slow_->backward_p1 = [this](const Context&) { sleep_for(ms_); };
  }
  StepReport run(P2Policy policy) {
    Pipeline pipeline(model_, test::no_costs(model_), options_of({3, 4}));
    StepRequest options = step_request();
    options.want_events = true;
    return pipeline.run(pipeline.plan("1f1b", 4, policy, {P2Batching::kLoop, 0}), random_batch(4), options);
  }
  static double idle(const StepReport& report, int rank, IdleCause cause) {
    return report.ranks[rank].idle[static_cast<int>(cause)];
  }

  // A busy machine may stop a rank for longer than stage 1 takes. So the test repeats a failed check with a slower
  // stage.
  void expect_at_some_pace(const std::function<bool()>& holds) {
    for (const int ms : {15, 60, 240}) {
      ms_ = ms;
      if (holds()) return;
    }
    ADD_FAILURE() << "at no pace";
  }

  ModelSpec model_;
  std::shared_ptr<test::Hooks> slow_;
  int ms_ = 15;
};

// These are the times when the last W of micro-batch m on stage 0 ended, and when I of m began.
struct Moments {
  std::vector<double> p1_begin = std::vector<double>(4, 0);
  std::vector<double> p2_end = std::vector<double>(4, 0);
  std::vector<int> units = std::vector<int>(4, 0);
};

Moments moments_of(const std::vector<Event>& events) {
  Moments moments;
  for (const Event& event : events) {
    if (event.kind == Event::Kind::kBackwardP1) moments.p1_begin[event.micro_batch] = event.begin;
    if (event.kind == Event::Kind::kBackwardP2) {
      moments.p2_end[event.micro_batch] = event.end;
      ++moments.units[event.micro_batch];
    }
  }
  return moments;
}

TEST_F(Waiting, FillRunsWInTheWaits) {
  expect_at_some_pace([&] {
    const Moments moments = moments_of(run(P2Policy::kFill).events[0]);
    bool in_time = true;
    for (int m = 0; m < 4; ++m) {
      // The five leaf layers with a backward-p2 are the embedding, qkv, o, gate_up and down.
      EXPECT_EQ(moments.units[m], 5);
      // This W fits into the time that stage 1 takes for the next micro-batch.
      in_time &= m == 0 || moments.p2_end[m - 1] < moments.p1_begin[m];
    }
    return in_time;
  });
}

TEST_F(Waiting, EndRunsWAfterTheLastI) {
  const Moments moments = moments_of(run(P2Policy::kEnd).events[0]);
  for (int m = 0; m < 4; ++m) {
    EXPECT_EQ(moments.units[m], 5);
    EXPECT_GT(moments.p2_end[m], moments.p1_begin[3]);
  }
}

TEST_F(Waiting, IdleCausesDistinguishFillFromEnd) {
  expect_at_some_pace([&] {
    const StepReport fill = run(P2Policy::kFill);
    EXPECT_EQ(idle(fill, 0, IdleCause::kMessage), 0) << "with W pending, fill never waits";
    const StepReport end = run(P2Policy::kEnd);
    // The three waits for I 1, 2 and 3 happen while W is pending. Each lasts for F and I of stage 1.
    const double waits = 3.3e-3 * ms_;
    return idle(fill, 0, IdleCause::kNothing) > waits && idle(end, 0, IdleCause::kMessage) > waits;
  });
}

// Busy time and idle time by cause make up the whole step, except for the executor's own work. That work may take 10 %.
TEST_F(Waiting, TimesAddUpToTheStep) {
  for (const P2Policy policy : kPolicies) {
    SCOPED_TRACE(policy_name(policy));
    expect_at_some_pace([&] {
      const StepReport report = run(policy);
      bool complete = true;
      for (const auto& rank : report.ranks) {
        double sum = rank.busy;
        for (const double seconds : rank.idle) {
          EXPECT_GE(seconds, 0);
          sum += seconds;
        }
        EXPECT_LE(sum, report.seconds() * (1 + 1e-9));
        complete &= sum >= report.seconds() * 0.9;
      }
      return complete;
    });
  }
}

// The events agree with the sums.
TEST_F(Waiting, EventsAgreeWithTheTimes) {
  const StepReport report = run(P2Policy::kFill);
  for (int r = 0; r < 2; ++r) {
    double forward = 0;
    double p2 = 0;
    double last = report.begin;
    std::set<int> forwards;
    for (const Event& event : report.events[r]) {
      EXPECT_LE(event.begin, event.end);
      EXPECT_GE(event.end, last);
      last = event.end;
      if (event.kind == Event::Kind::kForward) forward += event.end - event.begin, forwards.insert(event.micro_batch);
      if (event.kind == Event::Kind::kBackwardP2) p2 += event.end - event.begin;
    }
    EXPECT_EQ(forwards, (std::set<int>{0, 1, 2, 3}));
    EXPECT_NEAR(forward, report.stages[r].forward, 1e-6);
    EXPECT_NEAR(p2, report.stages[r].backward_p2, 1e-6);
    EXPECT_EQ(report.stages[r].micro_batches, 4);
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
