// Tests errors of layers. A layer throws on any stage, in F, I or W. The other ranks wake up, one Error names the rank,
// step and instruction, and nothing hangs. A peer that is stuck causes a time-out.
#include <chrono>
#include <stdexcept>
#include <thread>

#include "tests/pipeline/support.h"
#include "tests/transport/counted.h"
#include "twobp/core/measure.h"
#include "twobp/pipeline/executor/rank_executor.h"
#include "twobp/pipeline/stage.h"
#include "twobp/transport/collectives.h"
#include "twobp/transport/start.h"
#include "twobp/transport/threads/in_process.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::error_of;
using test::expect_contains;
using test::options_of;
using test::random_batch;
using test::small_llama;
using test::step_request;

struct Broken {
  ModelSpec model = small_llama(2);  // 6 layers, 2 per stage
  std::shared_ptr<test::Hooks> hooks;

  int layer;

  explicit Broken(int stage) : layer(2 * stage + 1) { hooks = test::insert_probe(model, layer); }
  // Returns the name of the probe in messages.
  std::string place() const { return concat("stage ", layer / 2, ", layer probe before ", layer); }
  std::vector<int> split(int stage) const {
    std::vector<int> split = {2, 2, 2};
    ++split[stage];
    return split;
  }
};

std::string run_to_error(const Broken& broken, int stage, const char* schedule, P2Policy policy,
                         double timeout = test::kTimeout) {
  PipelineOptions options = options_of(broken.split(stage));
  options.timeout = timeout;
  Pipeline pipeline(broken.model, test::no_costs(broken.model), options);
  const StepPlan plan = pipeline.plan(schedule, 4, policy);
  const double begin = now_seconds();
  const std::string message = error_of([&] { pipeline.run(plan, random_batch(4), step_request()); });
  EXPECT_LT(now_seconds() - begin, 10) << "others waited for the time-out of " << timeout << " s";
  // Destroying the pipeline must not hang either, and the pipeline says why it cannot continue.
  expect_contains(error_of([&] { pipeline.run(plan, random_batch(4), step_request()); }),
                  {"failed in an earlier step"});
  return message;
}

using Place = std::tuple<int, const char*, P2Policy>;

class LayerThrows : public ::testing::TestWithParam<Place> {};

TEST_P(LayerThrows, InForward) {
  const auto [stage, schedule, policy] = GetParam();
  const Broken broken(stage);
  broken.hooks->forward = [](const Context& context) {
    if (context.micro_batch == 1) throw std::runtime_error("out of luck");
  };
  const std::string message = run_to_error(broken, stage, schedule, policy);
  expect_contains(message, {concat("rank ", stage, ", step 5, ", stage, "F1: ", broken.place(), ": out of luck")});
}

TEST_P(LayerThrows, InBackwardP1) {
  const auto [stage, schedule, policy] = GetParam();
  const Broken broken(stage);
  broken.hooks->backward_p1 = [](const Context& context) {
    if (context.micro_batch == 2) throw std::runtime_error("out of luck");
  };
  const char* letter = policy == P2Policy::kOff ? "B2" : "I2";
  const std::string message = run_to_error(broken, stage, schedule, policy);
  expect_contains(message,
                  {concat("rank ", stage, ", step 5, ", stage, letter, ": ", broken.place(), ": out of luck")});
}

// Under fill, W runs inside the waiting receive, so the error may name any instruction of the rank.
TEST_P(LayerThrows, InBackwardP2) {
  const auto [stage, schedule, policy] = GetParam();
  const Broken broken(stage);
  broken.hooks->backward_p2 = [](int64_t micro_batch) {
    if (micro_batch == 3) throw std::runtime_error("out of luck");
  };
  const std::string message = run_to_error(broken, stage, schedule, policy);
  expect_contains(message, {concat("rank ", stage, ", step 5, ", stage),
                            concat(": ", broken.place(), ", W of micro-batch 3: out of luck")});
}

INSTANTIATE_TEST_SUITE_P(Everywhere, LayerThrows,
                         ::testing::Combine(::testing::Values(0, 1, 2), ::testing::Values("gpipe", "1f1b"),
                                            ::testing::Values(P2Policy::kOff, P2Policy::kEnd, P2Policy::kCooldown,
                                                              P2Policy::kFill)),
                         [](const auto& info) {
                           return concat("Stage", std::get<0>(info.param), "_", std::get<1>(info.param), "_",
                                         policy_name(std::get<2>(info.param)));
                         });

// LibTorch's errors include a backtrace. Users get only its first line.
TEST(LayerError, FromLibTorchIsOneLine) {
  const Broken broken(1);
  broken.hooks->forward = [](const Context&) { at::mm(at::ones({2, 3}), at::ones({2, 3})); };
  const std::string message = run_to_error(broken, 1, "1f1b", P2Policy::kFill);
  expect_contains(message, {concat("rank 1, step 5, 1F0: ", broken.place(), ": "), "shapes cannot be multiplied"});
  EXPECT_EQ(message.find("frame #"), std::string::npos) << message;
  EXPECT_EQ(message.find("Exception raised from"), std::string::npos) << message;
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
}

// The measurement before training runs a layer for the first time.
TEST(LayerError, InTheMeasurementNamesTheLayer) {
  const Broken broken(1);
  broken.hooks->forward = [](const Context&) { at::mm(at::ones({2, 3}), at::ones({2, 3})); };
  const std::string message = error_of([&] { measure_profile(broken.model, random_batch(1)[0], 0, Device()); });
  expect_contains(
      message, {"layer probe before 3, F of the measurement before the first step: ", "shapes cannot be multiplied"});
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
}

// The layer before would read past the end, or broadcast.
TEST(LayerError, AGradientThatDoesNotFitNamesTheLayer) {
  class Misfit : public Layer {
   public:
    explicit Misfit(bool none) : none_(none) {}
    Values forward(Values x, Context&, Saved&) override { return x; }
    Values backward_p1(Values dy, Context&, Saved&) override {
      return none_ ? Values{} : Values{dy[0].narrow(2, 0, 1)};
    }

   private:
    bool none_;
  };
  for (const bool none : {true, false}) {
    ModelSpec model = small_llama(2);
    model.layers.insert(model.layers.begin() + 3, {"mine", "mine", [none] { return std::make_unique<Misfit>(none); }});
    expect_contains(error_of([&] { measure_profile(model, random_batch(1)[0], 0, Device()); }),
                    {"layer mine, I of the measurement before the first step: backward_p1 returns ",
                     none ? "no gradient of its input" : "1], but its input has ["});
  }
}

// This layer does not keep a tensor that its W reads.
TEST(LayerError, NamesASavedTensorThatIsMissing) {
  const Broken broken(1);
  broken.hooks->backward_p2 = [](int64_t) { Saved().p2(1); };
  expect_contains(run_to_error(broken, 1, "1f1b", P2Policy::kFill),
                  {concat(": ", broken.place(), ", W of micro-batch 0: backward-p2 asks for saved tensor 1 of 0 ")});
}

TEST(LayerError, OfAnyTypeEndsAllRanks) {
  const Broken broken(1);
  broken.hooks->forward = [](const Context& context) {
    if (context.micro_batch == 2) throw 42;
  };
  expect_contains(run_to_error(broken, 1, "1f1b", P2Policy::kFill), {"rank 1, step 5, 1F2: "});
}

TEST(LayerError, InAnEvaluationNamesTheLayer) {
  const Broken broken(2);
  broken.hooks->forward = [](const Context& context) {
    if (context.micro_batch == 1) throw std::runtime_error("out of luck");
  };
  Pipeline pipeline(broken.model, test::no_costs(broken.model), options_of(broken.split(2)));
  StepRequest options = step_request();
  options.training = false;
  const std::string message = error_of([&] { pipeline.run(pipeline.forward_plan(3), random_batch(3), options); });
  expect_contains(message, {concat("rank 2, batch 5 of an evaluation, 2F1: ", broken.place(), ": out of luck")});
}

// Without this check, a layer that forgets its W would not be trained, without any message.
TEST(LayerError, NamesAParameterWithoutGradient) {
  class Forgetful : public Layer {
   public:
    Values forward(Values x, Context&, Saved&) override { return x; }
    Values backward_p1(Values dy, Context&, Saved&) override { return dy; }
    void collect_parameters(std::vector<Parameter*>& parameters) override { parameters.push_back(&gain_); }

   private:
    Parameter gain_{{{"forgotten.gain", 4}}, {4}, at::kFloat, 0, 1};
  };
  for (const P2Policy policy : {P2Policy::kOff, P2Policy::kFill}) {
    ModelSpec model = small_llama(2);
    model.layers.insert(model.layers.begin() + 3,
                        {"forgetful", "forgetful", [] { return std::make_unique<Forgetful>(); }});
    Pipeline pipeline(model, test::no_costs(model), options_of({2, 3, 2}));
    expect_contains(error_of([&] { pipeline.run(pipeline.plan("1f1b", 4, policy), random_batch(4), step_request()); }),
                    {"rank 1, step 5: stage 1, layer forgetful: parameter forgotten.gain got no gradient"});
  }
}

// The update runs after the schedule. Its error reaches the caller and wakes ranks that are still in the step.
TEST(LayerError, InTheOptimizerEndsAllRanks) {
  const ModelSpec model = small_llama(2);
  for (const int broken : {0, 1, 2}) {
    Pipeline pipeline(model, test::no_costs(model), options_of({2, 2, 2}));
    StepRequest options = step_request();
    options.update = test::update_by([&](int rank) -> std::vector<Waited> {
      if (rank == broken) fail("no update today");
      at::Tensor sum = at::zeros({1});
      all_reduce_sum(pipeline.rank(rank).transport(), sum, 30);
      return {};
    });
    expect_contains(
        error_of([&] { pipeline.run(pipeline.plan("1f1b", 4, P2Policy::kFill), random_batch(4), options); }),
        {"no update today"});
  }
}

// The memory of an unfinished step is released at once, not when the pipeline is destroyed.
TEST(LayerError, ReleasesTheMemoryOfTheStep) {
  const Broken broken(1);
  broken.hooks->backward_p1 = [](const Context& context) {
    if (context.micro_batch == 1) throw std::runtime_error("out of luck");
  };
  Pipeline pipeline(broken.model, test::no_costs(broken.model), options_of(broken.split(1)));
  test::expect_error([&] { pipeline.run(pipeline.plan("gpipe", 4, P2Policy::kEnd), random_batch(4), step_request()); },
                     {});
  // The remaining memory is a message in a mailbox (at most one output or gradient per micro-batch) and the tables of
  // the rotary embedding.
  const int64_t message = test::kRows * test::kDim * test::kFloat;
  const int64_t tables = 2 * test::kSequence * 2 * test::kFloat;  // cos and sin, half a head of 4 wide
  for (int r = 0; r < 3; ++r) EXPECT_LE(pipeline.meter().held(r), 4 * message + tables) << "rank " << r;
}

TEST(StuckPeer, CausesATimeOut) {
  const Broken broken(0);
  broken.hooks->forward = [](const Context& context) {
    if (context.micro_batch == 1) std::this_thread::sleep_for(std::chrono::milliseconds(800));
  };
  const std::string message = run_to_error(broken, 0, "1f1b", P2Policy::kFill, /*timeout=*/0.2);
  expect_contains(message, {"rank ", "step 5", "waited 0.2 s for", "from rank", "stuck", "pipeline.timeout"});
}

// The time-out applies to each wait. Shorter waits are no error, even if their sum is longer.
TEST(StuckPeer, ASlowPeerIsNotStuck) {
  const Broken broken(0);
  broken.hooks->forward = [](const Context&) { std::this_thread::sleep_for(std::chrono::milliseconds(100)); };
  PipelineOptions options = options_of(broken.split(0));
  options.timeout = 0.6;
  Pipeline pipeline(broken.model, test::no_costs(broken.model), options);
  const StepReport report = pipeline.run(pipeline.plan("gpipe", 8, P2Policy::kFill), random_batch(8), step_request());
  EXPECT_GT(report.ranks[1].idle[static_cast<int>(IdleCause::kNothing)], options.timeout)
      << "the waits of rank 1 in total";
}

// Two processes whose plans send the same messages in another order, which NCCL would not notice.
TEST(OtherOrder, IsRefusedBeforeTheStep) {
  const ModelSpec model = small_llama(1);  // 4 layers
  const auto schedule_of = [](bool swapped) {
    Schedule schedule;
    schedule.name = "by hand";
    schedule.stages = 4;
    schedule.micro_batches = 2;
    schedule.rank_of_stage = {0, 1, 0, 1};
    for (const int first : {0, 1}) {
      std::vector<Instruction> list = {
          {Op::kForward, first, 0}, {Op::kForward, first, 1}, {Op::kForward, first + 2, 0}};
      if (swapped) std::swap(list[1], list[2]);
      list.push_back({Op::kForward, first + 2, 1});
      for (const int stage : {first + 2, first}) {
        for (const int mb : {0, 1}) list.push_back({Op::kBackward, stage, mb});
      }
      schedule.ranks.push_back(std::move(list));
    }
    return test::finished(std::move(schedule), P2Policy::kOff);
  };
  for (const bool swapped : {false, true}) {
    std::vector<std::shared_ptr<test::Counted>> ends;
    std::vector<World> worlds;
    for (auto& end : make_in_process_transports(2, 0)) {
      ends.push_back(std::make_shared<test::Counted>(std::move(end)));
      worlds.push_back(make_process_world(std::shared_ptr<Transport>(ends.back()), 1, 2));
    }
    const auto run = [&] {
      run_worlds(std::move(worlds), [&](World world) {
        const bool other = swapped && world.process() == 0;
        Pipeline pipeline(model, test::no_costs(model), options_of({1, 1, 1, 1}, {0, 1, 0, 1}), std::move(world));
        for (const P2Batching batching : {P2Batching::kLoop, P2Batching::kConcat}) {
          const StepPlan plan = pipeline.plan(schedule_of(other), {batching, 0});
          for (int step = 0; step < 2; ++step) pipeline.run(plan, random_batch(2), step_request());
        }
      });
    };
    if (swapped) {
      expect_contains(error_of(run),
                      {"rank 1 expects from rank 0 message 2 of a step to be 1RECV_F1, but that rank sends 3RECV_F0"});
    } else {
      EXPECT_NO_THROW(run());
      for (const auto& end : ends) {
        int lists = 0;
        for (const auto& [what, count] : end->sent()) lists += what.second == MessageKind::kOrder ? count : 0;
        EXPECT_EQ(lists, 1) << "of one schedule, which two plans have";
      }
    }
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
