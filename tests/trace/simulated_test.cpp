// Tests a simulated schedule as events. They fill the step exactly and agree with the sums of the simulation.
#include "twobp/trace/simulated.h"

#include "tests/trace/support.h"

namespace twobp::TWOBP_FILE {
namespace {

constexpr int kStages = 3;
constexpr int kMicroBatches = 5;

std::vector<StageCost> uneven_costs() {
  std::vector<StageCost> costs(kStages);
  for (int s = 0; s < kStages; ++s) {
    costs[s].forward = 1 + 0.3 * s;
    costs[s].backward_p1 = 1.5 - 0.2 * s;
    costs[s].backward_p2 = 0.9 + 0.1 * s;
    costs[s].p2_units = 4;
    costs[s].optimizer = 0.5;
  }
  return costs;
}

void expect_equal_sums(const Schedule& schedule, const SimulationOptions& options) {
  const auto costs = uneven_costs();
  const Simulation simulation = simulate(schedule, costs, options);
  const StepReport report = simulated_step(simulation);
  constexpr double kRounding = 1e-9;
  EXPECT_EQ(report.seconds(), simulation.step_seconds);
  ASSERT_EQ(report.events.size(), simulation.ranks.size());
  for (size_t r = 0; r < report.events.size(); ++r) {
    const RankSimulation& rank = simulation.ranks[r];
    double last = 0;
    double busy = 0;
    int64_t peak = 0;
    std::array<double, kIdleCauses> idle{};
    for (const Event& event : report.events[r]) {
      EXPECT_NEAR(event.begin, last, kRounding);
      last = event.end;
      const double seconds = event.end - event.begin;
      if (event.kind == Event::Kind::kIdle) {
        idle[static_cast<int>(event.cause)] += seconds;
      } else {
        busy += seconds;
      }
      peak = std::max(peak, event.peak);
      EXPECT_GE(event.held, 0);
    }
    EXPECT_NEAR(last, simulation.step_seconds, kRounding);
    EXPECT_NEAR(busy, rank.busy, kRounding);
    for (int cause = 0; cause < kIdleCauses; ++cause) {
      EXPECT_NEAR(idle[cause], rank.idle[cause], kRounding) << idle_cause_name(static_cast<IdleCause>(cause));
    }
    EXPECT_NEAR(static_cast<double>(peak), 1000 * rank.peak_bytes, 1);
  }
}

TEST(SimulatedStep, AgreesWithTheSimulation) {
  for (const char* name : {"naive", "gpipe", "1f1b"}) {
    for (const P2Policy policy : {P2Policy::kOff, P2Policy::kEnd, P2Policy::kCooldown, P2Policy::kFill}) {
      SCOPED_TRACE(concat(name, " ", policy_name(policy)));
      const int micro_batches = name == std::string("naive") ? 1 : kMicroBatches;
      expect_equal_sums(make_schedule(name, kStages, micro_batches, policy), {});
      SimulationOptions options;
      options.message_seconds = 0.25;
      options.cap_per_rank = {2, 2, 2};
      expect_equal_sums(make_schedule(name, kStages, micro_batches, policy), options);
    }
  }
}

TEST(SimulatedStep, AForwardScheduleHoldsNothingAfterwards) {
  const auto costs = uneven_costs();
  const Schedule schedule = make_forward_schedule(place_stages(Placement::kLinear, kStages, kStages), 2);
  const StepReport report = simulated_step(simulate(schedule, costs));
  for (const auto& events : report.events) {
    for (const Event& event : events) {
      EXPECT_EQ(event.held, 0);
      EXPECT_NE(event.kind, Event::Kind::kOptimizer);
    }
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
