// Tests the promise of the byte cap: 2BP never holds more than standard backpropagation does on its fullest rank. The
// walk that computes the cap agrees with the meter. A small cap costs time and nothing else.
//
// Between threads, a message belongs to its sender until the receiver takes it. That moment depends on the clock, while
// the walk releases the message at once. So most tests here send copies that no rank is charged for.
#include <algorithm>
#include <atomic>
#include <cmath>

#include "benchmarks/emulated.h"
#include "tests/pipeline/step_bytes.h"
#include "twobp/plan/memory/stage_bytes.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::finished;
using test::fixed_bytes;
using test::kMessage;
using test::measured;
using test::measured_peaks;
using test::options_of;
using test::random_batch;
using test::SplitModel;
using test::step_request;
using test::take_gradients;

// Sends copies whose memory no meter sees. The receiver makes its own copy when it takes the message.
class OffTheBooks : public Transport {
 public:
  explicit OffTheBooks(std::unique_ptr<Transport> inner) : inner_(std::move(inner)) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  void isend(int to, const Tag& tag, Values values) override {
    for (auto& value : values) {
      auto* numbers = new std::vector<float>(value.numel());
      const at::Tensor copy = at::from_blob(
          numbers->data(), value.sizes(), [numbers](void*) { delete numbers; }, value.options());
      value = copy.copy_(value);
    }
    inner_->isend(to, tag, std::move(values));
  }
  bool try_receive(int from, const Tag& tag, Values& values) override {
    if (!inner_->try_receive(from, tag, values)) return false;
    values = own(values);
    return true;
  }
  Values receive(int from, const Tag& tag, double timeout) override { return own(inner_->receive(from, tag, timeout)); }
  void abort(const std::string& reason) override { inner_->abort(reason); }

 private:
  static Values own(const Values& values) {
    Values copies;
    for (const auto& value : values) copies.push_back(value.clone());
    return copies;
  }

  std::unique_ptr<Transport> inner_;
};

// Makes memory for what is expected, and receives into it, as transports between processes do.
class MakesMemory : public OffTheBooks {
 public:
  MakesMemory(std::unique_ptr<Transport> inner, std::atomic<int>& made) : OffTheBooks(std::move(inner)), made_(made) {}
  bool expect(int, const Tag& tag, const Forms& forms) override {
    Values values;
    for (const Form& form : forms) values.push_back(at::empty_strided(form.sizes, form.strides, form.type));
    waiting_.push_back({tag, std::move(values)});
    ++made_;
    return true;
  }
  bool try_receive(int from, const Tag& tag, Values& values) override {
    if (!OffTheBooks::try_receive(from, tag, values)) return false;
    values = into_memory(tag, std::move(values));
    return true;
  }
  Values receive(int from, const Tag& tag, double timeout) override {
    return into_memory(tag, OffTheBooks::receive(from, tag, timeout));
  }

 private:
  Values into_memory(const Tag& tag, Values values) {
    const auto here = std::ranges::find(waiting_, tag, &std::pair<Tag, Values>::first);
    if (here == waiting_.end()) return values;
    for (size_t i = 0; i < values.size(); ++i) here->second[i].copy_(values[i]);
    values = std::move(here->second);
    waiting_.erase(here);
    return values;
  }

  std::atomic<int>& made_;
  std::vector<std::pair<Tag, Values>> waiting_;
};

Pipeline pipeline_off_the_books(const SplitModel& of) {
  World world = std::move(make_in_process_worlds(1, static_cast<int>(of.split.size()), 0).front());
  for (auto& transport : world.pipeline) transport = std::make_unique<OffTheBooks>(std::move(transport));
  return Pipeline(of.model, measured(of.model), options_of(of.split), std::move(world));
}

std::vector<SplitModel> cases() {
  return {{"mlp on 1", test::small_mlp(4), {4}},        {"mlp on 2", test::small_mlp(4), {1, 3}},
          {"mlp on 3", test::small_mlp(6), {2, 2, 2}},  {"llama on 1", test::small_llama(2), {6}},
          {"llama on 2", test::small_llama(2), {3, 3}}, {"llama on 4", test::small_llama(3), {2, 2, 2, 2}}};
}

// Neighbouring layers have different modes, and each mode occurs twice.
ModelSpec mixed(ModelSpec model) {
  std::vector<Recompute> modes;
  for (size_t i = 0; i < model.layers.size(); ++i) modes.push_back(static_cast<Recompute>(3 - i % 4));
  recompute(model, modes);
  return model;
}

// Also models that compute again, in every mode.
std::vector<SplitModel> all_cases() {
  std::vector<SplitModel> all = cases();
  for (const std::string& name : recompute_names()) {
    const Recompute mode = parse_recompute(name);
    all.push_back({"mlp on 1, " + name, test::with_mode(test::small_mlp(4), mode), {4}});
    all.push_back({"mlp on 2, " + name, test::with_mode(test::small_mlp(4), mode), {1, 3}});
    all.push_back({"llama on 1, " + name, test::with_mode(test::small_llama(2), mode), {6}});
    all.push_back({"llama on 3, " + name, test::with_mode(test::small_llama(3), mode), {3, 3, 2}});
  }
  all.push_back({"mixed llama on 1", mixed(test::small_llama(3)), {8}});
  all.push_back({"mixed llama on 2", mixed(test::small_llama(3)), {4, 4}});
  return all;
}

TEST(StandardPeaks, AreWhatTheMeterMeasures) {
  for (const SplitModel& c : all_cases()) {
    Pipeline pipeline = pipeline_off_the_books(c);
    for (const char* schedule : {"naive", "gpipe", "1f1b"}) {
      for (const int micro_batches : {1, 2, 5}) {
        const StepPlan plan = pipeline.plan(schedule, micro_batches, P2Policy::kOff, {P2Batching::kLoop, 0});
        EXPECT_EQ(measured_peaks(pipeline, plan), plan.standard_peaks)
            << c.name << ", " << schedule << ", M " << micro_batches;
      }
    }
  }
}

// A rank never has more messages in transit than micro-batches.
TEST(StandardPeaks, GrowByTheMessagesInTransit) {
  for (const SplitModel& c : cases()) {
    Pipeline pipeline = test::measured_pipeline(c);
    const StepPlan plan = pipeline.plan("1f1b", 4, P2Policy::kOff, {P2Batching::kLoop, 0});
    const auto peaks = measured_peaks(pipeline, plan);
    for (size_t r = 0; r < peaks.size(); ++r) {
      EXPECT_GE(peaks[r], plan.standard_peaks[r]) << c.name;
      EXPECT_LE(peaks[r], plan.standard_peaks[r] + 4 * kMessage) << c.name;
    }
  }
}

// Stages of one rank hand tensors over without messages: a V shape, which the walk covers completely.
TEST(StandardPeaks, CoverSeveralStagesARank) {
  const ModelSpec model = test::small_mlp(4);
  Pipeline pipeline(model, measured(model), options_of({1, 1, 1, 1}, {0, 0, 0, 0}));
  Schedule schedule;
  schedule.name = "one rank";
  schedule.stages = 4;
  schedule.micro_batches = 2;
  schedule.rank_of_stage = {0, 0, 0, 0};
  schedule.ranks.resize(1);
  for (int stage = 0; stage < 4; ++stage) {
    for (int m = 0; m < 2; ++m) schedule.ranks[0].push_back({Op::kForward, stage, m});
  }
  for (int stage = 3; stage >= 0; --stage) {
    for (int m = 0; m < 2; ++m) schedule.ranks[0].push_back({Op::kBackward, stage, m});
  }
  const StepPlan plan = pipeline.plan(finished(schedule, P2Policy::kOff), {P2Batching::kLoop, 0});
  EXPECT_EQ(measured_peaks(pipeline, plan), standard_peaks(plan.schedule, profiled_costs(pipeline.layer_costs())));
}

int64_t fullest(Pipeline& pipeline, const StepPlan& plan) {
  const auto peaks = measured_peaks(pipeline, plan);
  const auto fixed = fixed_bytes(pipeline);
  int64_t most = 0;
  for (size_t r = 0; r < peaks.size(); ++r) most = std::max(most, peaks[r] + fixed[r]);
  return most;
}

// This is the promise of `auto` under every policy: no rank holds more in total than the fullest rank of standard
// backpropagation. On several ranks, W that computes again may take some bytes more, less than a message has.
TEST(AutoCap, IsNeverAboveTheFullestStandardRank) {
  const size_t plain = cases().size();
  const std::vector<SplitModel> all = all_cases();
  for (size_t i = 0; i < all.size(); ++i) {
    const SplitModel& c = all[i];
    Pipeline pipeline = pipeline_off_the_books(c);
    for (const char* schedule : {"gpipe", "1f1b"}) {
      for (const int micro_batches : {2, 4, 8}) {
        const StepPlan standard = pipeline.plan(schedule, micro_batches, P2Policy::kOff);
        pipeline.run(standard, random_batch(micro_batches), step_request());
        take_gradients(pipeline);
        const auto fixed = fixed_bytes(pipeline);
        int64_t allowed = 0;
        for (size_t r = 0; r < fixed.size(); ++r) allowed = std::max(allowed, fixed[r] + standard.standard_peaks[r]);
        if (i >= plain && c.split.size() > 1) allowed += kMessage - 1;
        for (const P2Policy policy : {P2Policy::kEnd, P2Policy::kCooldown, P2Policy::kFill}) {
          const StepPlan plan = pipeline.plan(schedule, micro_batches, policy);
          EXPECT_LE(fullest(pipeline, plan), allowed)
              << c.name << ", " << schedule << ", M " << micro_batches << ", " << policy_name(policy);
        }
      }
    }
  }
}

// Memory that waits for messages counts: ranks run W for it. Standard ranks have none, so this much may come on top.
TEST(AutoCap, CountsMemoryThatWaitsForMessages) {
  for (const SplitModel& c : cases()) {
    const auto ranks = static_cast<int>(c.split.size());
    if (ranks == 1) continue;
    std::atomic<int> made = 0;
    World world = std::move(make_in_process_worlds(1, ranks, 0).front());
    for (auto& transport : world.pipeline) transport = std::make_unique<MakesMemory>(std::move(transport), made);
    world.all_local = false;  // each rank books its messages
    Pipeline pipeline(c.model, measured(c.model), options_of(c.split), std::move(world));
    const StepPlan standard = pipeline.plan("1f1b", 8, P2Policy::kOff);
    pipeline.run(standard, random_batch(8), step_request());
    take_gradients(pipeline);
    const auto fixed = fixed_bytes(pipeline);
    int64_t allowed = 0;
    for (size_t r = 0; r < fixed.size(); ++r) allowed = std::max(allowed, fixed[r] + standard.standard_peaks[r]);
    for (const P2Policy policy : {P2Policy::kEnd, P2Policy::kFill}) {
      made = 0;
      EXPECT_LE(fullest(pipeline, pipeline.plan("1f1b", 8, policy)), allowed + 4 * kMessage)
          << c.name << ", " << policy_name(policy);
      EXPECT_EQ(made, 2 * 2 * 8 * (ranks - 1)) << c.name << ": two steps";
    }
  }
}

// This is the purpose of the cap. Without it, p2 at the end holds the stash of every micro-batch at once.
TEST(AutoCap, BindsWhereTheStashWouldGrow) {
  const ModelSpec model = test::small_mlp(4);
  Pipeline pipeline(model, measured(model), options_of({2, 2}));
  const int64_t capped = fullest(pipeline, pipeline.plan("1f1b", 8, P2Policy::kEnd));
  const int64_t uncapped = fullest(pipeline, pipeline.plan("1f1b", 8, P2Policy::kEnd, {P2Batching::kLoop, 0}));
  // The stash of two blocks for 8 micro-batches compares with their activations for 2 micro-batches.
  EXPECT_GT(uncapped, capped + 4 * 2 * test::kStash);
}

TEST(AutoCap, AFactorAllowsThatMuchMoreToWait) {
  const ModelSpec model = test::small_mlp(4);
  Pipeline pipeline(model, measured(model), options_of({2, 2}));
  const auto peak = [&](MemoryCap cap) {
    return fullest(pipeline, pipeline.plan("1f1b", 8, P2Policy::kEnd, {P2Batching::kLoop, cap}));
  };
  const int64_t once = peak(MemoryCap::automatic());
  const int64_t more = peak(MemoryCap::automatic(1.1));
  // The number of messages in transit at a peak differs from run to run.
  constexpr int64_t kUnderWay = 4 * kMessage;
  EXPECT_GT(more, once + 2 * kMessage);
  EXPECT_LE(more, once * 11 / 10 + kUnderWay);
  EXPECT_NEAR(static_cast<double>(peak(MemoryCap::automatic(1000))), static_cast<double>(peak(MemoryCap::none())),
              kUnderWay);
}

// Caps are those of the largest micro-batch so far, so that W waits as long as with those that were measured.
TEST(AutoCap, GrowsWithTheMicroBatches) {
  const ModelSpec model = test::small_mlp(4);
  PipelineOptions options = options_of({2, 2});
  options.measured = size_of(test::random_fields(1));
  Pipeline pipeline(model, measured(model), options);
  const auto plan = [&](MemoryCap cap) { return pipeline.plan("1f1b", 8, P2Policy::kEnd, {P2Batching::kLoop, cap}); };
  const StepPlan first = plan(MemoryCap::automatic(1.5));
  const auto caps_times = [&](double size) {
    const BatchSize one = size_of(test::random_fields(1));
    const auto costs = pipeline.layer_costs({one.numbers * size, one.squares * size});
    return auto_caps(standard_peaks(*first.standard, profiled_costs(costs)), fixed_bytes(pipeline), 1.5);
  };
  // The peak of a rank apart from what it holds between steps.
  const auto peak = [&](const StepPlan& plan, int64_t samples) {
    std::vector<Fields> batch;
    for (int m = 0; m < 8; ++m) batch.push_back(test::random_fields(m + 1, samples));
    pipeline.run(plan, batch, step_request());
    take_gradients(pipeline);
    const auto fixed = fixed_bytes(pipeline);
    pipeline.meter().reset_peaks();
    const StepReport step = pipeline.run(plan, batch, step_request());
    take_gradients(pipeline);
    return step.rank_memory[0].peak - fixed[0];
  };
  peak(first, test::kBatch);
  EXPECT_EQ(plan(MemoryCap::automatic(1.5)).caps, caps_times(1));
  const int64_t large = peak(first, 4 * test::kBatch);
  EXPECT_EQ(plan(MemoryCap::automatic(1.5)).caps, caps_times(4));
  EXPECT_LE(large, caps_times(4)[0] + 4 * (4 * kMessage));  // those in transit differ from run to run
  const int64_t with_the_first_cap = peak(plan(MemoryCap(first.caps[0])), 4 * test::kBatch);
  EXPECT_GT(large, with_the_first_cap + test::kStash);
  peak(first, 3 * test::kBatch);
  EXPECT_EQ(plan(MemoryCap::automatic(1.5)).caps, caps_times(4));
  peak(first, 5 * test::kBatch);
  EXPECT_EQ(plan(MemoryCap::automatic(1.5)).caps, caps_times(std::exp2(38.0 / 16)));  // rounded up
}

TEST(AutoCap, GivesEachRankTheTotalOfTheFullest) {
  EXPECT_EQ(auto_caps({100, 300, 50}, {1000, 900, 10}), (std::vector<int64_t>{200, 300, 1190}));
  EXPECT_EQ(auto_caps({100, 300, 50}, {1000, 900, 10}, 1.5), (std::vector<int64_t>{800, 900, 1790}));
}

// With a cap of one byte nothing is kept for later: the bytes are those with p2 off, except for the stash of one layer.
TEST(ByteCap, ATinyCapLeavesNothingPending) {
  const ModelSpec model = test::small_mlp(4);
  Pipeline pipeline(model, measured(model), options_of({4}));
  const auto off = measured_peaks(pipeline, pipeline.plan("gpipe", 4, P2Policy::kOff, {P2Batching::kLoop, 0}));
  const auto tiny = measured_peaks(pipeline, pipeline.plan("gpipe", 4, P2Policy::kEnd, {P2Batching::kLoop, 1}));
  EXPECT_LE(tiny[0], off[0] + test::kStash);
}

// A received message is booked on its receiver, which makes room for it first. On rank 0, F2 fits within the cap beside
// the stash of W0. When dL/dx of micro-batch 1 arrives, the message of F2 is still there, because rank 1 runs a slow
// W1.
TEST(ByteCap, MakesRoomForAMessage) {
  constexpr int64_t kStash = 1000;
  constexpr int64_t kBoundary = 400;
  const EmulatedLayer held{
      .backward_p2 = 1e-4, .activation_bytes = kStash, .stash_bytes = kStash, .boundary_bytes = kBoundary};
  const EmulatedLayer slow{.backward_p2 = 0.02, .activation_bytes = 8, .stash_bytes = 8, .boundary_bytes = 8};
  const ModelSpec model = emulated({held, slow});
  Pipeline pipeline(model, test::no_costs(model), options_of({1, 1}));
  Schedule schedule;
  schedule.name = "f2 before i1";
  schedule.stages = 2;
  schedule.micro_batches = 4;
  schedule.rank_of_stage = {0, 1};
  schedule.ranks.resize(2);
  for (const auto& [op, m] : {std::pair{Op::kForward, 0},
                              {Op::kForward, 1},
                              {Op::kBackwardP1, 0},
                              {Op::kForward, 2},
                              {Op::kBackwardP1, 1},
                              {Op::kForward, 3},
                              {Op::kBackwardP1, 2},
                              {Op::kBackwardP1, 3}}) {
    schedule.ranks[0].push_back({op, 0, m});
  }
  schedule.ranks[0].push_back({Op::kBackwardP2, 0, 0, 4});
  for (int m = 0; m < 4; ++m) {
    for (const Op op : {Op::kForward, Op::kBackwardP1, Op::kBackwardP2}) {
      schedule.ranks[1].push_back({op, 1, m});
    }
  }
  const StepPlan plan =
      pipeline.plan(finished(schedule, P2Policy::kPlaced), {P2Batching::kLoop, 3 * kStash + kBoundary});
  StepRequest options = step_request();
  options.want_events = true;
  const StepReport report = pipeline.run(plan, std::vector<Fields>(4), options);
  int pending = 0;
  int received = 0;
  for (const Event& event : report.events[0]) {
    if (event.kind == Event::Kind::kBackwardP1 && event.part == 0) ++pending;
    if (event.kind == Event::Kind::kBackwardP2) --pending;
    if (event.kind != Event::Kind::kReceive) continue;
    ++received;
    EXPECT_EQ(event.bytes, kBoundary);
    if (pending > 0) {
      EXPECT_LE(event.held, plan.options.memory_cap.bytes()) << "with dL/dx of " << event.micro_batch;
    }
  }
  EXPECT_EQ(received, 4);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
