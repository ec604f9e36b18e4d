// Tests the shop-scheduling problem that the search works on, against its definition and the simulation.
#include <algorithm>
#include <cmath>

#include "tests/plan/pipelines.h"
#include "twobp/plan/auto_schedule/problem.h"

namespace twobp::TWOBP_FILE {
namespace {

PipelineProblem problem_of(const Pipeline& pipeline) {
  return {pipeline.rank_of_stage, pipeline.micro_batches, pipeline.costs, pipeline.options, pipeline.slices};
}

PipelineProblem plain(std::vector<int> rank_of_stage, int micro_batches, int slices = 1) {
  std::vector<StageCost> costs(rank_of_stage.size());
  return {std::move(rank_of_stage), micro_batches, std::move(costs), {}, slices};
}

// What a pipeline itself demands, without the order of a schedule: a matrix of "runs before".
class Demands {
 public:
  explicit Demands(const PipelineProblem& problem) : problem_(problem), count_(problem.tasks()) {
    before_.assign(static_cast<size_t>(count_) * count_, false);
    for (int stage = 0; stage < problem.stages(); ++stage) {
      for (int place = 0; place < problem.units(); ++place) add_of(stage, place);
    }
    for (int k = 0; k < count_; ++k) {
      for (int a = 0; a < count_; ++a) {
        if (!get(a, k)) continue;
        for (int b = 0; b < count_; ++b) {
          if (get(k, b)) set(a, b);
        }
      }
    }
  }
  bool get(int a, int b) const { return before_[static_cast<size_t>(a) * count_ + b]; }

 private:
  void set(int a, int b) { before_[static_cast<size_t>(a) * count_ + b] = true; }
  void add_of(int stage, int place) {
    const auto id = [&](Op op, int s, int p) { return problem_.task(op, s, p); };
    const int last = problem_.stages() - 1;
    for (const Op op : {Op::kForward, Op::kBackwardP1, Op::kBackwardP2}) {
      if (place > 0) set(id(op, stage, place - 1), id(op, stage, place));
    }
    if (stage > 0) set(id(Op::kForward, stage - 1, place), id(Op::kForward, stage, place));
    if (stage < last) set(id(Op::kBackwardP1, stage + 1, place), id(Op::kBackwardP1, stage, place));
    set(id(Op::kBackwardP1, stage, place), id(Op::kBackwardP2, stage, place));
    // The first I of a micro-batch is of its last slice.
    const int slices = problem_.slices();
    const int first = place / slices * slices;
    set(id(Op::kForward, last, first + slices - 1), id(Op::kBackwardP1, last, first));
  }

  const PipelineProblem& problem_;
  int count_;
  std::vector<bool> before_;
};

TEST(PipelineProblem, NumbersItsOps) {
  const PipelineProblem problem = plain({0, 1, 1}, 4, 2);
  EXPECT_EQ(problem.ranks(), 2);
  EXPECT_EQ(problem.units(), 8);
  EXPECT_EQ(problem.tasks(), 3 * 3 * 8);
  EXPECT_EQ(problem.stages_of_rank(1), (std::vector<int>{1, 2}));
  int next = 0;
  for (const Op op : {Op::kForward, Op::kBackwardP1, Op::kBackwardP2}) {
    for (int stage = 0; stage < 3; ++stage) {
      for (int place = 0; place < 8; ++place, ++next) {
        EXPECT_EQ(problem.task(op, stage, place), next);
        EXPECT_EQ(problem.op(next), op);
        EXPECT_EQ(problem.stage(next), stage);
        EXPECT_EQ(problem.place(next), place);
        EXPECT_EQ(problem.micro_batch(next), place / 2);
        EXPECT_EQ(problem.slot(next), stage * 8 + place);
        // I and W run the two slices of a micro-batch last to first.
        const int unit = op == Op::kForward ? place : place % 2 == 0 ? place + 1 : place - 1;
        EXPECT_EQ(problem.unit(next), unit);
        EXPECT_EQ(problem.unit_at(op, unit), place);
      }
    }
  }
}

TEST(PipelineProblem, KnowsWhatEveryScheduleDemands) {
  for (const auto& [rank_of_stage, micro_batches, slices] : {std::tuple{std::vector<int>{0, 1, 1, 0}, 3, 1},
                                                             {std::vector<int>{0, 1, 1, 0}, 2, 2},
                                                             {std::vector<int>{0, 1, 0, 1}, 2, 3},
                                                             {std::vector<int>{0, 0}, 3, 1}}) {
    const PipelineProblem problem = plain(rank_of_stage, micro_batches, slices);
    const Demands demands(problem);
    for (int a = 0; a < problem.tasks(); ++a) {
      for (int b = 0; b < problem.tasks(); ++b) {
        if (a == b || problem.rank(a) != problem.rank(b)) continue;
        const auto text = [&] {
          return testing::Message() << op_name(problem.op(a)) << problem.stage(a) << '.' << problem.place(a) << ' '
                                    << op_name(problem.op(b)) << problem.stage(b) << '.' << problem.place(b);
        };
        EXPECT_EQ(problem.precedes(a, b, false), demands.get(a, b)) << text();
        if (problem.op(b) != Op::kBackwardP1) continue;
        // B is I and W: the W in earlier places of its stage come before it.
        const int w = problem.task(Op::kBackwardP2, problem.stage(b), problem.place(b) - 1);
        const bool earlier_w = problem.place(b) > 0 && (a == w || demands.get(a, w));
        EXPECT_EQ(problem.precedes(a, b, true), demands.get(a, b) || earlier_w) << text();
      }
    }
  }
}

TEST(PipelineProblem, KnowsMessagesAndTheirDuration) {
  Pipeline pipeline;
  pipeline.rank_of_stage = {0, 1, 1, 2};
  pipeline.micro_batches = 2;
  pipeline.costs.resize(4);
  for (StageCost& cost : pipeline.costs) {
    cost.output_bytes = 6;
    cost.input_gradient_bytes = 4;
  }
  pipeline.options.message_seconds = 0.5;
  pipeline.options.bytes_per_second = 2;
  pipeline.options.shared_links = {{"slow", {{1, 2}}, 1, 1}, {"latency", {{2, 1}}, 3, 0}};
  const PipelineProblem problem = problem_of(pipeline);
  const auto f = [&](int stage) { return problem.task(Op::kForward, stage, 1); };
  const auto i = [&](int stage) { return problem.task(Op::kBackwardP1, stage, 1); };
  const std::vector<int> f_senders = {-1, f(0), -1, f(2)}, f_receivers = {f(1), -1, f(3), -1};
  const std::vector<int> i_senders = {i(1), -1, i(3), -1}, i_receivers = {-1, i(0), -1, i(2)};
  const std::vector<double> f_delays = {0, 3.5, 0, 7}, i_delays = {2.5, 0, 3, 0};
  for (int stage = 0; stage < 4; ++stage) {
    EXPECT_EQ(problem.sender(f(stage)), f_senders[stage]);
    EXPECT_EQ(problem.receiver(f(stage)), f_receivers[stage]);
    EXPECT_EQ(problem.delay_to(f(stage)), f_delays[stage]);
    EXPECT_EQ(problem.sender(i(stage)), i_senders[stage]);
    EXPECT_EQ(problem.receiver(i(stage)), i_receivers[stage]);
    EXPECT_EQ(problem.delay_to(i(stage)), i_delays[stage]);
    const int w = problem.task(Op::kBackwardP2, stage, 1);
    EXPECT_EQ(problem.sender(w), -1);
    EXPECT_EQ(problem.receiver(w), -1);
    EXPECT_EQ(problem.delay_to(w), 0);
  }
}

TEST(PipelineProblem, CountsSecondsAndBytesOfEachSlice) {
  Pipeline pipeline;
  pipeline.rank_of_stage = {0, 0};
  pipeline.slices = 2;
  pipeline.costs.resize(4);  // stage 0 and 1 of slice 0, then of slice 1
  for (int i = 0; i < 4; ++i) {
    StageCost& cost = pipeline.costs[i];
    cost.forward = 1 + i;
    cost.backward_p1 = 10 + i;
    cost.backward_p2 = 100 + i;
    cost.activation_bytes = 5 + i;
    cost.stash_bytes = 2 + i;
    cost.optimizer = i < 2 ? 7 : 1000;  // of a stage, read from slice 0
  }
  const PipelineProblem problem = problem_of(pipeline);
  EXPECT_EQ(problem.optimizer(0), 14);
  EXPECT_FALSE(problem.capped(0));
  // I and W of slice 1 come first.
  const int f = problem.task(Op::kForward, 1, 0), i = problem.task(Op::kBackwardP1, 1, 0),
            w = problem.task(Op::kBackwardP2, 1, 0);
  EXPECT_EQ(problem.seconds(f, false), 2);
  EXPECT_EQ(problem.seconds(i, false), 13);
  EXPECT_EQ(problem.seconds(i, true), 13 + 103);
  EXPECT_EQ(problem.seconds(w, false), 103);
  EXPECT_EQ(problem.bytes(f, false), 6);
  EXPECT_EQ(problem.bytes(i, false), 5 - 8);
  EXPECT_EQ(problem.bytes(i, true), -8);
  EXPECT_EQ(problem.bytes(w, false), -5);
  EXPECT_EQ(problem.peak(f, false), 6);
  EXPECT_EQ(problem.peak(i, true), 0);
  EXPECT_EQ(problem.peak(w, false), 0);
}

// Without layers and messages, an order fits if and only if its simulation does. And a simulation gives back its order.
TEST(PipelineProblem, FitsWhatTheSimulationFits) {
  Random random(8);
  const std::vector<Placement> placements = {Placement::kLinear, Placement::kV, Placement::kLooped};
  int fitting = 0, capped = 0;
  for (int round = 0; round < 150; ++round) {
    Pipeline pipeline = random_pipeline(random, placements.at(round % 3), random_int(random, 2, 4),
                                        random_int(random, 1, 6), false, round % 4 == 3 ? 2 : 1);
    for (StageCost& cost : pipeline.costs) cost.p2_units = 1;
    if (round % 5 == 4) make_unequal(random, pipeline);
    const PipelineProblem problem = problem_of(pipeline);
    const auto named = named_schedules_on(pipeline.rank_of_stage, pipeline.micro_batches, pipeline.slices);
    const NamedVariant& variant = named[random_int(random, 0, static_cast<int>(named.size()) - 1)];
    const Schedule schedule = make_schedule(variant.name, static_cast<int>(pipeline.rank_of_stage.size()),
                                            pipeline.micro_batches, variant.policy, pipeline.ranks(), pipeline.slices);
    SimulationOptions no_caps = pipeline.options;
    no_caps.cap_per_rank.clear();
    const TaskOrder order = problem.from_simulation(simulate(schedule, pipeline.costs, no_caps));
    ASSERT_EQ(order.ranks.size(), static_cast<size_t>(pipeline.ranks()));
    const Schedule back = problem.to_schedule(order, P2Policy::kPlaced);
    EXPECT_EQ(back.policy, P2Policy::kPlaced);
    EXPECT_EQ(back.name, "auto");
    const Simulation simulation = simulate(back, pipeline.costs, no_caps);
    EXPECT_EQ(problem.from_simulation(simulation).ranks, order.ranks);
    EXPECT_EQ(problem.fits(order), within_caps(simulation, pipeline.options)) << round;
    if (pipeline.options.cap_per_rank.empty()) continue;
    ++capped;
    fitting += problem.fits(order) ? 1 : 0;
  }
  EXPECT_GT(fitting, 10);
  EXPECT_GT(capped - fitting, 10);
}

// A W that made room between the layers of F counts as W before this F. The W of an I comes after it, even if a part of
// the I comes later.
TEST(PipelineProblem, OrdersOpsThatRanInParts) {
  const PipelineProblem problem = plain({0}, 2);
  Simulation simulation;
  simulation.ranks.resize(1);
  const auto ran = [&](Op op, int micro_batch, int part = 0) {
    simulation.ranks[0].timeline.push_back({.op = op, .micro_batch = micro_batch, .part = part});
  };
  ran(Op::kForward, 0);
  ran(Op::kBackwardP1, 0);
  ran(Op::kForward, 1);
  ran(Op::kBackwardP2, 0);
  ran(Op::kForward, 1, 1);
  ran(Op::kBackwardP1, 1);
  ran(Op::kBackwardP2, 1);
  ran(Op::kBackwardP1, 1, 1);
  std::vector<int> order;
  for (const int micro_batch : {0, 1}) {
    for (const Op op : {Op::kForward, Op::kBackwardP1, Op::kBackwardP2})
      order.push_back(problem.task(op, 0, micro_batch));
  }
  EXPECT_EQ(problem.from_simulation(simulation).ranks[0], order);
}

TEST(PipelineProblem, RefusesAnOrderThatIsNoneOfASchedule) {
  const PipelineProblem problem = plain({0}, 2);
  Simulation simulation;
  simulation.ranks.resize(1);
  simulation.ranks[0].timeline = {{Op::kForward, 0, 1}, {Op::kForward, 0, 0}};
  EXPECT_TRUE(problem.from_simulation(simulation).ranks.empty());
}

TEST(PipelineProblem, SaysWhatIsWrong) {
  const auto error = [](const Pipeline& pipeline) { return error_of([&] { problem_of(pipeline); }); };
  Pipeline good;
  good.rank_of_stage = {0, 1};
  good.costs.resize(2);
  EXPECT_EQ(error(good), "");
  Pipeline bad = good;
  bad.costs.resize(3);
  expect_contains(error(bad), {"2 stages", "got 3"});
  bad = good;
  bad.rank_of_stage = {0, 2};
  expect_contains(error(bad), {"rank 1 has no stage"});
  bad.rank_of_stage = {0, 1 << 20};
  expect_contains(error(bad), {"stage 1 is placed on rank 1048576"});
  bad.rank_of_stage = {-1, 0};
  expect_contains(error(bad), {"stage 0 is placed on rank -1"});
  bad = good;
  bad.options.cap_per_rank = {1};
  expect_contains(error(bad), {"1 entries for 2 ranks"});
  bad.options.cap_per_rank = {0, 1};
  EXPECT_EQ(error(bad), "") << "0 is no cap, and 1 is just enough";
  bad.options.cap_per_rank = {0, 0.9};
  expect_contains(error(bad), {"no schedule fits the cap of rank 1"});
  bad.options.cap_per_rank = {-1, 1};
  expect_contains(error(bad), {"cap_per_rank holds -1"});
  for (double* number : {&bad.options.message_seconds, &bad.options.bytes_per_second}) {
    bad.options.cap_per_rank.clear();
    *number = -1;
    expect_contains(error(bad), {"is -1, must be finite"});
    *number = 0;
  }
  for (const SharedLink& link : {SharedLink{"a", {{0, 1}}, -1, 0}, SharedLink{"b", {{0, 1}}, 0, -1}}) {
    bad.options.shared_links = {link};
    expect_contains(error(bad), {"of a shared link is -1"});
  }
  bad = good;
  bad.micro_batches = 833334;  // 3 x 2 x that is just over 5 million
  expect_contains(error(bad), {"too many"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
