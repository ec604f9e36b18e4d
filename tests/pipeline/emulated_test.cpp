// Tests layers that wait instead of computing (benchmarks/emulated.h) on the real executor. They take at least the
// requested time and hold the requested bytes in the meter. So the memory bounds of the V-shaped schedules (arXiv
// 2405.15362) hold for the bytes of a real run, not only in the simulation.
#include "benchmarks/emulated.h"

#include <algorithm>
#include <set>

#include "tests/pipeline/support.h"
#include "twobp/schedule/named_schedules.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::no_costs;
using test::step_request;

constexpr int64_t kActivation = 1 << 20;  // of a stage and micro-batch; the memory is never touched
constexpr int64_t kSmall = 1 << 12;       // messages, losses, and gradients of the input: a few bytes each

int64_t held_at_peak(const MemoryUse& use) {
  return use.at_peak[static_cast<size_t>(MemoryCategory::kActivations)] +
         use.at_peak[static_cast<size_t>(MemoryCategory::kStash)];
}

EmulatedLayer layer_of(double seconds, int64_t activation, int64_t stash) {
  EmulatedLayer layer;
  layer.forward = layer.backward_p1 = layer.backward_p2 = seconds;
  layer.activation_bytes = activation;
  layer.stash_bytes = stash;
  return layer;
}

struct Step {
  Schedule schedule;
  StepReport report;
  int64_t left = 0;  // bytes held after the step by all ranks
};

// Runs a step with one layer per stage. The schedule places the stages.
Step run_step(const std::string& name, int ranks, int micro_batches, P2Policy policy, const EmulatedLayer& layer) {
  const Placement placement = named_schedule(name).placement;
  const int stages = ranks * usual_stages_per_rank(placement);
  const ModelSpec model = emulated(std::vector<EmulatedLayer>(stages, layer));
  Pipeline pipeline(model, no_costs(model),
                    test::options_of(std::vector<int>(stages, 1), place_stages(placement, stages, ranks)));
  const StepPlan plan = pipeline.plan(name, micro_batches, policy, {P2Batching::kLoop, 0});
  Step step{plan.schedule, pipeline.run(plan, std::vector<Fields>(micro_batches), step_request())};
  for (int r = 0; r < ranks; ++r) step.left += pipeline.meter().held(r);
  return step;
}

TEST(Emulated, HoldsTheBytesOfItsActivationsAndOfItsStash) {
  constexpr int m = 5;
  for (const int64_t stash : {int64_t{0}, kActivation / 4, kActivation, 3 * kActivation}) {
    const EmulatedLayer layer = layer_of(1e-4, kActivation, stash);
    // All F run, then all I, then all W. The bytes go from M activations to M stashes.
    const Step deferred = run_step("gpipe", 1, m, P2Policy::kEnd, layer);
    const int64_t most = m * std::max(kActivation, stash);
    EXPECT_GE(held_at_peak(deferred.report.rank_memory[0]), most) << stash;
    EXPECT_LE(held_at_peak(deferred.report.rank_memory[0]), most + kSmall) << stash;
    // W runs right after its I. One stash lies beside the activations of the other micro-batches.
    const Step standard = run_step("gpipe", 1, m, P2Policy::kOff, layer);
    const int64_t one = (m - 1) * kActivation + std::max(kActivation, stash);
    EXPECT_GE(held_at_peak(standard.report.rank_memory[0]), one) << stash;
    EXPECT_LE(held_at_peak(standard.report.rank_memory[0]), one + kSmall) << stash;
    EXPECT_LE(deferred.left + standard.left, kSmall) << "nothing is left over";
  }
}

// A W that takes no time also frees its stash.
TEST(Emulated, ALayerWithoutTimeHoldsTheSame) {
  const Step naive = run_step("naive", 1, 4, P2Policy::kOff, layer_of(0, kActivation, kActivation));
  EXPECT_GE(held_at_peak(naive.report.rank_memory[0]), kActivation);
  EXPECT_LE(held_at_peak(naive.report.rank_memory[0]), kActivation + kSmall);
}

// A wait may take longer on a busy machine, but never less.
TEST(Emulated, TakesAsLongAsAsked) {
  EmulatedLayer layer;
  layer.forward = 2e-3;
  layer.backward_p1 = 3e-3;
  layer.backward_p2 = 1e-3;
  for (const P2Policy policy : {P2Policy::kOff, P2Policy::kEnd}) {
    const Step two = run_step("1f1b", 2, 3, policy, layer);
    for (const StageTimes& times : two.report.stages) {
      ASSERT_EQ(times.micro_batches, 3);
      EXPECT_GE(times.forward, 3 * layer.forward);
      EXPECT_GE(times.backward_p1, 3 * layer.backward_p1);
      EXPECT_GE(times.backward_p2, 3 * layer.backward_p2);
    }
    EXPECT_GE(two.report.seconds(), 4 * layer.forward + 4 * layer.backward_p1)
        << "each message takes one hop, in both directions";
  }
}

TEST(Emulated, EqualLayersAreOfOneKind) {
  const EmulatedLayer small = layer_of(1e-3, 1, 1);
  const EmulatedLayer large = layer_of(1e-3, 2, 2);
  const ModelSpec model = emulated({small, large, small, large, large, small});
  std::set<std::string> inner;
  for (size_t i = 1; i + 1 < model.layers.size(); ++i) inner.insert(model.layers[i].kind);
  EXPECT_EQ(inner.size(), 2U);
  EXPECT_EQ(model.layers[1].kind, model.layers[3].kind);
  EXPECT_FALSE(inner.contains(model.layers.front().kind)) << "the first layer takes no input";
  EXPECT_FALSE(inner.contains(model.layers.back().kind)) << "the last layer returns the loss";
}

TEST(Emulated, RefusesImpossibleRequests) {
  EXPECT_THROW(emulated({}), Error);
  EXPECT_THROW(emulated({layer_of(-1, 0, 0)}), Error);
  EXPECT_THROW(emulated({layer_of(1e-3, -1, 0)}), Error);
  EXPECT_THROW(emulated({layer_of(1e-3, 0, -1)}), Error);
}

// Returns the largest number of micro-batches whose W is still to run.
int most_pending(const std::vector<Instruction>& list) {
  int pending = 0;
  int most = 0;
  for (const Instruction& instruction : list) {
    if (instruction.op == Op::kBackwardP1) most = std::max(most, pending += instruction.count);
    if (instruction.op == Op::kBackwardP2) pending -= instruction.count;
  }
  return most;
}

class EmulatedBounds : public ::testing::TestWithParam<int> {};

// The bounds count micro-batches of a rank's whole share: N for 1f1b and ZB-V, floor((N + 2) / 2) for V-Half, floor((N
// + 4) / 3) for V-Min. The paper does not count the derivatives that I makes beside the activations and keeps for W.
// They are added for each micro-batch between its I and its W on a stage.
TEST_P(EmulatedBounds, HoldInTheMeter) {
  const int n = GetParam();
  struct Case {
    const char* name;
    P2Policy policy;
    int bound;  // micro-batches of a rank's share
  };
  const std::vector<Case> cases = {{"1f1b", P2Policy::kOff, n},
                                   {"zb-v", P2Policy::kPlaced, n},
                                   {"v-half", P2Policy::kPlaced, (n + 2) / 2},
                                   {"v-min", P2Policy::kPlaced, (n + 4) / 3}};
  for (const Case& c : cases) {
    const int per_rank = usual_stages_per_rank(named_schedule(c.name).placement);
    for (const int64_t derivatives : {int64_t{0}, kActivation / 2}) {
      const EmulatedLayer layer = layer_of(1e-3 / per_rank, kActivation, kActivation + derivatives);
      const Step ran = run_step(c.name, n, 2 * n, c.policy, layer);
      int64_t fullest = 0;
      for (int r = 0; r < n; ++r) {
        const int pending = c.policy == P2Policy::kOff ? 1 : most_pending(ran.schedule.ranks[r]);
        const int64_t held = held_at_peak(ran.report.rank_memory[r]);
        EXPECT_LE(held, c.bound * per_rank * kActivation + pending * derivatives + kSmall)
            << c.name << " on " << n << ", rank " << r << ", derivatives " << derivatives;
        fullest = std::max(fullest, held);
      }
      // The bound is tight: the fullest rank holds exactly as much.
      EXPECT_GE(fullest, c.bound * per_rank * kActivation) << c.name << " on " << n;
      EXPECT_LE(ran.left, kSmall) << c.name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, EmulatedBounds, ::testing::Values(4, 6, 8));

}  // namespace
}  // namespace twobp::TWOBP_FILE
