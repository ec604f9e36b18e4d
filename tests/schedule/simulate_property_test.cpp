// Tests random schedules, costs and links. The simulation is compared with a second, slow one that ticks through time,
// and with a bound that no schedule can beat.
#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include <gtest/gtest.h>

#include "tests/schedule/named.h"
#include "tests/schedule/reference.h"
#include "tests/schedule/support.h"
#include "twobp/schedule/passes.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp::TWOBP_FILE {
namespace {

// Costs are whole numbers and W has whole pieces, so that the ticking reference can follow.
std::vector<StageCost> random_costs(Random& random, int stages) {
  std::vector<StageCost> costs(stages);
  const bool messages = random_int(random, 0, 1) == 1;
  const bool layers = random_int(random, 0, 2) == 0;
  for (auto& cost : costs) {
    cost.forward = random_int(random, 1, 6);
    cost.backward_p1 = random_int(random, 1, 6);
    cost.p2_units = random_int(random, 1, 3);
    cost.backward_p2 = cost.p2_units * random_int(random, 1, 3);
    cost.activation_bytes = random_int(random, 0, 6);
    cost.stash_bytes = cost.p2_units * random_int(random, 0, 3);
    cost.gradient_bytes = random_int(random, 0, 9);
    cost.fixed_bytes = random_int(random, 0, 9);
    if (!messages) continue;
    cost.output_bytes = random_int(random, 0, 3);
    cost.input_gradient_bytes = random_int(random, 0, 3);
    if (!layers) continue;
    cost.forward = cost.backward_p1 = cost.backward_p2 = 0;
    int units = 0;
    for (int i = random_int(random, 1, 3); i > 0; --i) {
      LayerCost layer;
      layer.p2_units = random_int(random, 0, 2);
      layer.forward = random_int(random, 1, 3);
      layer.backward_p1 = random_int(random, 1, 3);
      layer.backward_p2 = layer.p2_units * random_int(random, 1, 3);
      layer.forward_peak = random_int(random, 0, 6);
      layer.forward_held = random_int(random, -1, 5);
      layer.p1_peak = random_int(random, 0, 6);
      layer.p1_held = random_int(random, -4, 3);
      layer.stash = layer.p2_units * random_int(random, 0, 2);
      layer.p2_peak = layer.p2_units > 0 ? random_int(random, 0, 3) : 0;
      cost.forward += layer.forward;
      cost.backward_p1 += layer.backward_p1;
      cost.backward_p2 += layer.backward_p2;
      units += layer.p2_units;
      cost.layers.push_back(layer);
    }
    if (units == 0) cost.gradient_bytes = 0;
  }
  return costs;
}

// Draws some of these: a cap, slow links, links that pairs of ranks share, an account for waiting messages, replicas.
SimulationOptions random_options(Random& random, const Schedule& schedule) {
  SimulationOptions options;
  const int ranks = schedule.rank_count();
  options.message_seconds = random_int(random, 0, 3);
  options.bytes_per_second = random_int(random, 0, 2) / 2.0;
  if (random_int(random, 0, 2) == 0) {
    options.shared_links =
        node_links(ranks, random_int(random, 1, 3), random_int(random, 0, 2), random_int(random, 0, 1));
  }
  if (random_int(random, 0, 1) == 1) {
    for (int rank = 0; rank < ranks; ++rank) options.cap_per_rank.push_back(random_int(random, 0, 20));
  } else {
    options.message_holder = static_cast<MessageHolder>(random_int(random, 0, 2));
  }
  if (random_int(random, 0, 1) == 1) {
    options.data_parallel = {random_int(random, 1, 4), random_int(random, 0, 3) * 1.0, random_int(random, 1, 4) / 2.0,
                             random_int(random, 0, 1) == 1};
  }
  return options;
}

// No schedule can beat a rank's work, or the path of one micro-batch through all stages and back.
double lower_bound(const Schedule& schedule, const std::vector<StageCost>& costs, const SimulationOptions& options) {
  std::vector<double> work(schedule.ranks.size(), 0);
  double longest = 0;
  const double message = options.shared_links.empty() ? options.message_seconds : 0;
  const size_t rows = costs.size() / schedule.stages;
  for (int m = 0; m < schedule.micro_batches; ++m) {
    const size_t row = m % rows * schedule.stages;
    double path = costs[row].backward_p2;
    for (int stage = 0; stage < schedule.stages; ++stage) {
      const StageCost& cost = costs[row + stage];
      const int rank = schedule.rank_of_stage[stage];
      work[rank] += cost.forward + cost.backward_p1 + cost.backward_p2 + (m == 0 ? cost.optimizer : 0);
      path += cost.forward + cost.backward_p1;
      if (stage > 0 && rank != schedule.rank_of_stage[stage - 1]) path += 2 * message;
    }
    longest = std::max(longest, path);
  }
  return std::max(longest, *std::max_element(work.begin(), work.end()));
}

// Moves the idle time that exists because other ranks have more work, as BubbleCause says.
void move_imbalance(Simulation& simulation) {
  double busiest = 0;
  for (const auto& rank : simulation.ranks) busiest = std::max(busiest, rank.busy);
  for (auto& rank : simulation.ranks) {
    const auto of = [&](BubbleCause cause) -> double& { return rank.bubble[static_cast<int>(cause)]; };
    for (double left = busiest - rank.busy; left > 1e-9;) {
      double* from = &of(BubbleCause::kNothing);
      if (*from <= 0) from = &of(BubbleCause::kDependency);
      if (*from <= 0) from = &of(BubbleCause::kStartUp);
      if (*from <= 0) from = &of(BubbleCause::kCommunication);
      const double taken = std::min({1.0, *from, left});
      *from -= taken;
      of(BubbleCause::kImbalance) += taken;
      left -= taken;
    }
  }
}

void expect_same_timeline(const RankSimulation& a, const RankSimulation& b) {
  ASSERT_EQ(a.timeline.size(), b.timeline.size());
  for (size_t i = 0; i < a.timeline.size(); ++i) {
    EXPECT_EQ(a.timeline[i].op, b.timeline[i].op);
    EXPECT_EQ(a.timeline[i].stage, b.timeline[i].stage);
    EXPECT_EQ(a.timeline[i].micro_batch, b.timeline[i].micro_batch);
    EXPECT_EQ(a.timeline[i].part, b.timeline[i].part);
    EXPECT_NEAR(a.timeline[i].begin, b.timeline[i].begin, 1e-9);
    EXPECT_NEAR(a.timeline[i].end, b.timeline[i].end, 1e-9);
  }
}

void check_against_reference(const Schedule& schedule, const std::vector<StageCost>& costs,
                             const SimulationOptions& options) {
  const Simulation fast = simulate(schedule, costs, options);
  Simulation slow = ReferenceExecutor(schedule, costs, options).run();
  move_imbalance(slow);
  EXPECT_GE(fast.step_seconds, lower_bound(schedule, costs, options) - 1e-9);
  ASSERT_NEAR(fast.step_seconds, slow.step_seconds, 1e-9);
  for (int rank = 0; rank < schedule.rank_count(); ++rank) {
    const auto& a = fast.ranks[rank];
    const auto& b = slow.ranks[rank];
    EXPECT_NEAR(a.busy, b.busy, 1e-9);
    EXPECT_NEAR(a.peak_bytes, b.peak_bytes, 1e-9);
    EXPECT_EQ(a.peak_bytes, a.peak.bytes);
    double total = a.busy;
    for (double idle : a.idle) {
      EXPECT_GE(idle, 0);
      total += idle;
    }
    EXPECT_NEAR(total, fast.step_seconds, 1e-9);
    total = a.busy;
    for (int cause = 0; cause < kBubbleCauses; ++cause) {
      EXPECT_NEAR(a.bubble[cause], b.bubble[cause], 1e-9)
          << bubble_cause_name(static_cast<BubbleCause>(cause)) << " of rank " << rank;
      total += a.bubble[cause];
    }
    EXPECT_NEAR(total, fast.step_seconds, 1e-9);
    expect_same_timeline(a, b);
  }
}

void check_against_reference(const Schedule& schedule, Random& random) {
  const auto costs = random_costs(random, schedule.stages);
  check_against_reference(schedule, costs, random_options(random, schedule));
}

// A row of costs for each micro-batch: whole multiples of these.
std::vector<StageCost> unequal_costs(Random& random, const std::vector<StageCost>& first, int rows) {
  std::vector<StageCost> costs = first;
  for (int row = 1; row < rows; ++row) {
    for (StageCost cost : first) {
      const int times = random_int(random, 1, 4);
      for (double StageCost::*of :
           {&StageCost::forward, &StageCost::backward_p1, &StageCost::backward_p2, &StageCost::activation_bytes,
            &StageCost::stash_bytes, &StageCost::output_bytes, &StageCost::input_gradient_bytes}) {
        cost.*of *= times;
      }
      for (LayerCost& layer : cost.layers) {
        for (double LayerCost::*of : {&LayerCost::forward, &LayerCost::backward_p1, &LayerCost::backward_p2,
                                      &LayerCost::forward_peak, &LayerCost::forward_held, &LayerCost::p1_peak,
                                      &LayerCost::p1_held, &LayerCost::stash, &LayerCost::p2_peak}) {
          layer.*of *= times;
        }
      }
      costs.push_back(std::move(cost));
    }
  }
  return costs;
}

// I of a micro-batch's last slice makes gradients for the earlier ones, whose own I frees them.
void give_gradients_of_slices(std::vector<StageCost>& costs, const Schedule& schedule) {
  for (size_t i = 0; i < costs.size(); ++i) {
    if (costs[i].layers.empty()) continue;
    LayerCost& layer = costs[i].layers.front();
    const bool last = static_cast<int>(i) / schedule.stages % schedule.slices + 1 == schedule.slices;
    layer.p1_held += last ? schedule.slices - 1 : -1;
    layer.p1_peak = std::max(layer.p1_peak, layer.p1_held);
  }
}

TEST(Property, NamedSchedulesMatchTheReference) {
  // With each of these seeds, a rank once takes a message after a fill at the moment when its sender begins an op. The
  // order of the two decides a peak.
  for (const int seed : {4, 36, 41}) {
    Random random(seed);
    for (int round = 0; round < 350 && !testing::Test::HasFailure(); ++round) {
      const Schedule schedule = random_named_schedule(random, 6, 12);
      SCOPED_TRACE(testing::Message() << schedule.name << " N=" << schedule.rank_count()
                                      << " M=" << schedule.micro_batches << " p2 " << policy_name(schedule.policy)
                                      << " seed " << seed << " round " << round);
      check_against_reference(schedule, random);
    }
  }
}

// As packed documents and slices of sequences do.
TEST(Property, MicroBatchesThatCostUnequallyMatchTheReference) {
  Random random(7);
  for (int round = 0; round < 350 && !testing::Test::HasFailure(); ++round) {
    const Schedule schedule = random_named_schedule(random, 6, round % 2 == 0 ? 12 : 4, round % 2 == 0 ? 1 : 4);
    SCOPED_TRACE(concat(schedule.name, " N=", schedule.rank_count(), " ", schedule.count_text(), " p2 ",
                        policy_name(schedule.policy), " round ", round));
    const auto first = random_costs(random, schedule.stages);
    auto costs = unequal_costs(random, first, schedule.micro_batches);
    if (schedule.slices > 1) give_gradients_of_slices(costs, schedule);
    check_against_reference(schedule, costs, random_options(random, schedule));
  }
}

TEST(Property, AnyPlacementAndOrderMatchesTheReference) {
  Random random(5);
  for (int round = 0; round < 1000 && !testing::Test::HasFailure(); ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    const bool place_w = round % 2 == 0;
    Schedule schedule =
        random_schedule(random, random_int(random, 1, 6), random_int(random, 1, 6), random_int(random, 1, 4), place_w);
    const P2Policy policy = kPolicies[random_int(random, 0, 3)];
    if (place_w) {
      schedule.policy = policy;  // it is followed as written, but `fill` may run W earlier
    } else {
      schedule = apply_p2_policy(std::move(schedule), policy);
    }
    check_against_reference(add_communication(std::move(schedule)), random);
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
