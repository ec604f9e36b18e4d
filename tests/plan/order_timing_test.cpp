// Tests what the local search knows of a move before it makes it, against the moved order as a whole.
#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "tests/plan/pipelines.h"
#include "twobp/plan/auto_schedule/timing.h"

namespace twobp::TWOBP_FILE {
namespace {

PipelineProblem problem_of(const Pipeline& pipeline) {
  return {pipeline.rank_of_stage, pipeline.micro_batches, pipeline.costs, pipeline.options, pipeline.slices};
}

// The order of a named schedule. Some of the W that follow their I at once are fused with it.
TaskOrder some_order(const Pipeline& pipeline, const PipelineProblem& problem, Random& random) {
  const auto named = named_schedules_on(pipeline.rank_of_stage, pipeline.micro_batches, pipeline.slices);
  const NamedVariant& variant = named[random_int(random, 0, static_cast<int>(named.size()) - 1)];
  const Schedule schedule = make_schedule(variant.name, static_cast<int>(pipeline.rank_of_stage.size()),
                                          pipeline.micro_batches, variant.policy, pipeline.ranks(), pipeline.slices);
  TaskOrder order = problem.from_simulation(simulate(schedule, pipeline.costs, pipeline.options));
  for (auto& list : order.ranks) {
    for (size_t i = 0; i + 1 < list.size(); ++i) {
      const bool own_w = problem.op(list[i]) == Op::kBackwardP1 && problem.op(list[i + 1]) == Op::kBackwardP2 &&
                         problem.slot(list[i]) == problem.slot(list[i + 1]);
      if (!own_w || random_int(random, 0, 1) == 0) continue;
      order.fused[problem.slot(list[i])] = 1;
      list.erase(list.begin() + static_cast<std::ptrdiff_t>(i) + 1);
    }
  }
  return order;
}

// Heads, tails and makespan of an order, by going through all ops until nothing changes.
struct Reference {
  std::vector<double> head;
  std::vector<double> tail;
  double makespan = 0;  // infinite on a deadlock
};
Reference reference(const PipelineProblem& problem, const TaskOrder& order) {
  Reference result{std::vector<double>(problem.tasks(), 0), std::vector<double>(problem.tasks(), 0), 0};
  const auto seconds = [&](int task) {
    return problem.seconds(task, problem.op(task) == Op::kBackwardP1 && order.fused[problem.slot(task)] != 0);
  };
  bool changes = true;
  for (int round = 0; changes; ++round) {
    changes = false;
    const auto raise = [&](double& value, double to) {
      changes |= to > value;
      value = std::max(value, to);
    };
    for (int rank = 0; rank < problem.ranks(); ++rank) {
      const auto& list = order.ranks[rank];
      for (size_t i = 0; i < list.size(); ++i) {
        const int task = list[i];
        if (i > 0) raise(result.head[task], result.head[list[i - 1]] + seconds(list[i - 1]));
        if (const int from = problem.sender(task); from >= 0)
          raise(result.head[task], result.head[from] + seconds(from) + problem.delay_to(task));
        raise(result.tail[task],
              i + 1 < list.size() ? seconds(list[i + 1]) + result.tail[list[i + 1]] : problem.optimizer(rank));
        if (const int to = problem.receiver(task); to >= 0)
          raise(result.tail[task], problem.delay_to(to) + seconds(to) + result.tail[to]);
        raise(result.makespan, result.head[task] + seconds(task) + result.tail[task]);
      }
    }
    if (round > problem.tasks()) {
      result.makespan = std::numeric_limits<double>::infinity();
      return result;
    }
  }
  return result;
}

// The smallest caps under which the order fits.
std::vector<double> needs(const PipelineProblem& problem, const TaskOrder& order) {
  std::vector<double> most;
  for (const auto& list : order.ranks) {
    double held = 0;
    most.push_back(0);
    for (const int task : list) {
      const bool fused = order.fused[problem.slot(task)] != 0;
      most.back() = std::max(most.back(), held + problem.peak(task, fused));
      held += problem.bytes(task, fused);
    }
  }
  return most;
}

TaskOrder moved(TaskOrder order, int rank, int from, int to) {
  auto& list = order.ranks[rank];
  const int task = list[from];
  list.erase(list.begin() + from);
  list.insert(list.begin() + to, task);
  return order;
}

bool near(double a, double b) {
  return a == b || std::abs(a - b) <= 1e-9 * std::max(std::abs(a), std::abs(b));
}

Pipeline small_pipeline(Random& random, int round) {
  const std::vector<Placement> placements = {Placement::kLinear, Placement::kV, Placement::kLooped};
  Pipeline pipeline =
      random_pipeline(random, placements.at(round % 3), random_int(random, 2, 3), random_int(random, 1, 4),
                      /*layered=*/round % 4 == 3, /*slices=*/round % 5 == 4 ? 2 : 1);
  if (round % 7 > 4) make_unequal(random, pipeline);
  return pipeline;
}

TEST(OrderTiming, KnowsTheMovedOrder) {
  Random random(5);
  int acyclic = 0, seen_acyclic = 0, within = 0, over = 0, exact = 0;
  for (int round = 0; round < 60; ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    Pipeline pipeline = small_pipeline(random, round);
    pipeline.options.cap_per_rank.clear();
    const PipelineProblem without_caps = problem_of(pipeline);
    const TaskOrder order = some_order(pipeline, without_caps, random);
    // Two rounds of three have caps that are just enough for the order.
    if (round % 3 > 0) pipeline.options.cap_per_rank = needs(without_caps, order);
    const PipelineProblem problem = problem_of(pipeline);
    OrderTiming timing(problem, order);
    for (int step = 0; step < 30; ++step) {
      const TaskOrder before = timing.order();
      const Reference old = reference(problem, before);
      ASSERT_TRUE(near(timing.update(), old.makespan));
      EXPECT_EQ(timing.makespan(), timing.update());
      const int rank = random_int(random, 0, problem.ranks() - 1);
      const int last = static_cast<int>(before.ranks[rank].size()) - 1;
      const int from = random_int(random, 0, last);
      const int to = random_int(random, std::max(0, from - 4), std::min(last, from + 4));
      if (from == to) continue;
      EXPECT_EQ(timing.position(before.ranks[rank][from]), from);
      const TaskOrder after = moved(before, rank, from, to);
      const Reference then = reference(problem, after);
      const bool runs = std::isfinite(then.makespan);
      acyclic += runs ? 1 : 0;
      const bool stays = timing.stays_acyclic(rank, from, to);
      seen_acyclic += stays ? 1 : 0;
      EXPECT_TRUE(runs || !stays);
      if (problem.fits(before) && problem.capped(rank)) {
        EXPECT_EQ(timing.stays_within_cap(rank, from, to), problem.fits(after));
        ++(problem.fits(after) ? within : over);
      } else if (!problem.capped(rank)) {
        EXPECT_TRUE(timing.stays_within_cap(rank, from, to));
      }
      if (!runs) continue;
      // If the move leaves what comes before and after the moved ops alone, the estimate is their longest path. Paths
      // without them are as long as before.
      bool alone = true;
      for (int at = std::min(from, to); at <= std::max(from, to); ++at) {
        const int task = before.ranks[rank][at];
        if (const int sender = problem.sender(task); sender >= 0) alone &= near(old.head[sender], then.head[sender]);
        if (const int receiver = problem.receiver(task); receiver >= 0)
          alone &= near(old.tail[receiver], then.tail[receiver]);
      }
      if (alone) {
        const double estimate = timing.estimate(rank, from, to);
        EXPECT_LE(estimate, then.makespan * (1 + 1e-9));
        EXPECT_GE(std::max(estimate, old.makespan), then.makespan * (1 - 1e-9));
        exact += near(estimate, then.makespan) ? 1 : 0;
      }
      if (!problem.fits(after)) continue;
      timing.move(rank, from, to);
      EXPECT_EQ(timing.order().ranks, after.ranks);
    }
  }
  // The tests above met all cases.
  EXPECT_GT(acyclic, 500);
  EXPECT_GT(seen_acyclic, acyclic * 2 / 3) << "it finds most";
  EXPECT_GT(within, 50);
  EXPECT_GT(over, 50);
  EXPECT_GT(exact, 300);
}

TEST(OrderTiming, SaysThatADeadlockNeverEnds) {
  Pipeline pipeline;
  pipeline.rank_of_stage = {0, 1};
  pipeline.costs.resize(2);
  const PipelineProblem problem = problem_of(pipeline);
  // Rank 0 waits for I of rank 1 before its own F.
  const auto id = [&](Op op, int stage) { return problem.task(op, stage, 0); };
  const TaskOrder order{{{id(Op::kBackwardP1, 0), id(Op::kForward, 0), id(Op::kBackwardP2, 0)},
                         {id(Op::kForward, 1), id(Op::kBackwardP1, 1), id(Op::kBackwardP2, 1)}},
                        {0, 0}};
  OrderTiming timing(problem, order);
  EXPECT_EQ(timing.update(), std::numeric_limits<double>::infinity());
  timing.reset(moved(order, 0, 1, 0));
  EXPECT_EQ(timing.update(), 5) << "F of both, I of both, W";
}

TEST(OrderTiming, FindsEveryCriticalPath) {
  // With equal costs, any way through the F of GPipe is as long as another.
  Pipeline pipeline;
  pipeline.rank_of_stage = {0, 1, 2};
  pipeline.micro_batches = 4;
  pipeline.costs.resize(3);
  for (int stage = 0; stage < 3; ++stage) pipeline.costs[stage].optimizer = 2 + stage;
  const PipelineProblem problem = problem_of(pipeline);
  Random random(3);
  OrderTiming timing(problem, problem.from_simulation(simulate(make_schedule("gpipe", 3, 4, P2Policy::kEnd),
                                                               pipeline.costs, pipeline.options)));
  const double makespan = timing.update();
  const Reference times = reference(problem, timing.order());
  SearchRandom chance(1);
  std::set<std::vector<int>> paths;
  std::set<int> lasts;
  for (int i = 0; i < 200; ++i) {
    std::vector<int> path = {7};  // is replaced
    timing.critical_path(chance, path);
    ASSERT_FALSE(path.empty());
    EXPECT_EQ(times.head[path.front()], 0);
    for (size_t at = 0; at + 1 < path.size(); ++at) {
      const bool next = problem.rank(path[at]) == problem.rank(path[at + 1]) &&
                        timing.position(path[at]) + 1 == timing.position(path[at + 1]);
      const bool sent = problem.sender(path[at + 1]) == path[at];
      ASSERT_TRUE(next || sent);
      EXPECT_EQ(times.head[path[at + 1]], times.head[path[at]] + 1);
    }
    const int last = problem.rank(path.back());
    EXPECT_EQ(times.head[path.back()] + 1 + 2 + last, makespan);
    lasts.insert(last);
    paths.insert(std::move(path));
  }
  EXPECT_EQ(lasts.size(), 3U) << "all ranks end at once";
  EXPECT_GT(paths.size(), 10U);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
