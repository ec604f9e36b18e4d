// Compares predictions with measurements. They must be equal if the "real" run is itself a simulation, and close for a
// small model.
#include "twobp/trace/compare.h"

#include <set>

#include "tests/trace/support.h"
#include "twobp/models/freeze.h"
#include "twobp/trace/read_trace.h"
#include "twobp/trace/simulated.h"
#include "twobp/trace/trace.h"

namespace twobp::TWOBP_FILE {
namespace {

std::vector<StageCost> uneven_costs(int stages) {
  std::vector<StageCost> costs(stages);
  for (int s = 0; s < stages; ++s) {
    costs[s].forward = 0.010 + 0.003 * s;
    costs[s].backward_p1 = 0.015 - 0.002 * s;
    costs[s].backward_p2 = 0.009 + 0.001 * s;
    costs[s].p2_units = 4;
    costs[s].activation_bytes = 1e6 + 1e5 * s;
    costs[s].stash_bytes = 7e5;
    costs[s].fixed_bytes = 3e6;
  }
  return costs;
}

// The run was the simulation itself, so its mean times are the costs and the comparison must be exact.
TEST(Compare, IsExactForASimulation) {
  for (const P2Policy policy : {P2Policy::kOff, P2Policy::kEnd, P2Policy::kCooldown}) {
    SCOPED_TRACE(policy_name(policy));
    const Schedule schedule = make_schedule("1f1b", 3, 5, policy);
    auto costs = uneven_costs(3);
    for (StageCost& cost : costs) cost.optimizer = 0.004;
    const Simulation simulation = simulate(schedule, costs);
    Trace trace;
    trace.steps = {simulated_step(simulation, 1)};
    auto profiled = costs;  // the profile's times must not matter
    for (StageCost& cost : profiled) cost.forward = cost.backward_p1 = cost.backward_p2 = 77;
    trace.run = TracedRun{schedule, profiled, {}};
    const Comparison result = compare(parse_trace(trace_json(trace), "run.json"));
    EXPECT_EQ(result.steps, 1);
    EXPECT_FALSE(result.replayed);
    EXPECT_NEAR(result.step_seconds.measured, simulation.step_seconds, 1e-9);
    EXPECT_NEAR(result.step_seconds.predicted, simulation.step_seconds, 1e-9);
    for (int s = 0; s < 3; ++s) {
      EXPECT_NEAR(result.costs[s].forward, costs[s].forward, 1e-9);
      EXPECT_NEAR(result.costs[s].backward_p1, costs[s].backward_p1, 1e-9);
      EXPECT_NEAR(result.costs[s].backward_p2, costs[s].backward_p2, 1e-9);
      EXPECT_NEAR(result.costs[s].optimizer, 0.004, 1e-9);
    }
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_NEAR(result.idle[rank].measured, simulation.idle_fraction(rank), 1e-6);
      EXPECT_NEAR(result.idle[rank].predicted, result.idle[rank].measured, 1e-6);
      EXPECT_NEAR(result.peak_bytes[rank].measured, simulation.ranks[rank].total_peak_bytes(), 2);
      EXPECT_NEAR(result.peak_bytes[rank].predicted, result.peak_bytes[rank].measured, 2);
    }
  }
}

// Under fill, bytes follow the order in which W really ran. Here, no wait would cause that order: W runs at the end,
// although there was time before.
TEST(Compare, ReplaysTheRecordedOrder) {
  const Schedule schedule = make_schedule("1f1b", 3, 5, P2Policy::kFill);
  const auto costs = uneven_costs(3);
  const Schedule held_back = make_schedule("1f1b", 3, 5, P2Policy::kEnd);
  const Simulation ran = simulate(held_back, costs);
  Trace trace;
  trace.steps = {simulated_step(ran, 1)};
  for (auto& events : trace.steps[0].events) {
    std::vector<Event> pieces;
    for (const Event& event : events) {
      const int parts = event.kind == Event::Kind::kBackwardP2 ? 4 : 1;
      for (int part = 0; part < parts; ++part) {
        pieces.push_back(event);
        pieces.back().begin = event.begin + (event.end - event.begin) * part / parts;
        pieces.back().end = event.begin + (event.end - event.begin) * (part + 1) / parts;
      }
    }
    events = std::move(pieces);
  }
  trace.run = TracedRun{schedule, costs, {}};
  const Comparison result = compare(trace);
  EXPECT_TRUE(result.replayed);
  double difference = 0;
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_NEAR(result.peak_bytes[rank].predicted, result.peak_bytes[rank].measured, 2);
    difference += result.peak_bytes[rank].predicted - result.simulation.ranks[rank].total_peak_bytes();
  }
  EXPECT_GT(difference, 1e5) << "the prediction is that of the simulation, which fills waits";
}

// This is the time that a message took while its receiver waited for it.
TEST(Compare, FindsTheTimeOfMessages) {
  const Schedule schedule = make_schedule("gpipe", 2, 1, P2Policy::kOff);
  const auto op = [](Event::Kind kind, int stage, double begin, double end) {
    Event event;
    event.kind = kind;
    event.stage = stage;
    event.micro_batch = 0;
    event.begin = begin;
    event.end = end;
    return event;
  };
  const auto message = [&](Event::Kind kind, int stage, int peer, double begin, double end) {
    Event event = op(kind, stage, begin, end);
    event.peer = peer;
    return event;
  };
  using Kind = Event::Kind;
  StepReport step;
  step.step = 1;
  step.end = 10;
  step.events = {
      {op(Kind::kForward, 0, 0, 1), message(Kind::kSend, 0, 1, 1, 1), op(Kind::kIdle, -1, 1, 5.5),
       message(Kind::kReceive, 0, 1, 5.5, 5.5), op(Kind::kBackwardP1, 0, 5.5, 7), op(Kind::kBackwardP2, 0, 7, 8)},
      {op(Kind::kIdle, -1, 0, 1.5), message(Kind::kReceive, 1, 0, 1.5, 1.5), op(Kind::kForward, 1, 1.5, 3),
       op(Kind::kBackwardP1, 1, 3, 4), op(Kind::kBackwardP2, 1, 4, 5), message(Kind::kSend, 1, 0, 5, 5)}};
  Trace trace;
  trace.steps = {step};
  trace.run = TracedRun{schedule, uneven_costs(2), {}};
  const Comparison result = compare(trace);
  EXPECT_NEAR(result.message_seconds, 0.5, 1e-9);
  // The step consists of F 1, message, F 1.5, B 2, message, B 2.5. The rest of the "step" is unused.
  EXPECT_NEAR(result.step_seconds.predicted, 1 + 0.5 + 1.5 + 2 + 0.5 + 2.5, 1e-9);
  EXPECT_NEAR(result.step_seconds.measured, 10, 1e-9);
  EXPECT_NEAR(result.idle[0].measured, 1 - 3.5 / 10, 1e-9);
}

// The layers wait, so the minimum time of each op is known. They hold bytes of every size.
constexpr double kWait = 5e-4;
constexpr int kLayers = 6;
ModelSpec waiting_layers() {
  std::vector<EmulatedLayer> layers;
  for (int i = 0; i < kLayers; ++i) {
    layers.push_back({.forward = kWait,
                      .backward_p1 = kWait,
                      .backward_p2 = kWait,
                      .activation_bytes = 40000 + 3000 * i,
                      .stash_bytes = 30000 + 7000 * (i % 2),
                      .boundary_bytes = 400 + 200 * (i % 3)});
  }
  return emulated(layers);
}

void expect_close_bytes(const Comparison& result, int micro_batches) {
  // The sender owns a message until the receiver takes it. That moment depends on the clock.
  for (size_t rank = 0; rank < result.peak_bytes.size(); ++rank) {
    const double under_way = micro_batches * 800.0;
    EXPECT_NEAR(result.peak_bytes[rank].predicted, result.peak_bytes[rank].measured, under_way) << rank;
  }
}

// A prediction and a run on the real executor are compared. No op is shorter than requested, so the step is not shorter
// either.
TEST(Compare, IsCloseForARealRun) {
  constexpr int kMicroBatches = 4;
  for (const P2Policy policy : {P2Policy::kOff, P2Policy::kEnd, P2Policy::kFill}) {
    SCOPED_TRACE(policy_name(policy));
    const Trace trace = test::traced_run_of(waiting_layers(), "", policy, "1f1b", kMicroBatches, 3, {3, 3});
    const Comparison result = compare(trace);
    EXPECT_EQ(result.steps, 3);
    EXPECT_EQ(result.replayed, policy == P2Policy::kFill);
    std::vector<StageCost> asked(2);
    for (int stage = 0; stage < 2; ++stage) {
      const StageCost& cost = result.costs[stage];
      for (const double seconds : {cost.forward, cost.backward_p1, cost.backward_p2}) {
        EXPECT_GE(seconds, 3 * kWait);
      }
      asked[stage].forward = asked[stage].backward_p1 = asked[stage].backward_p2 = 3 * kWait;
    }
    if (policy != P2Policy::kFill) {  // with shorter ops, the waits may be filled less well
      const double least = simulate(trace.run->schedule, asked).step_seconds;
      EXPECT_GE(result.step_seconds.predicted, least);
      EXPECT_GE(result.step_seconds.measured, least);
    }
    ASSERT_EQ(result.step.events.size(), 2U);
    expect_close_bytes(result, kMicroBatches);
  }
}

// Under a cap without free space, W of a layer runs before I of the next layer. It is recorded between the parts of its
// own I.
TEST(Compare, ReplaysWInsideItsOwnI) {
  constexpr int kMicroBatches = 4;
  const Trace trace =
      test::traced_run_of(waiting_layers(), "", P2Policy::kFill, "1f1b", kMicroBatches, 2, {3, 3}, {}, 1);
  int inside = 0;
  for (const auto& events : trace.steps[0].events) {
    std::set<int> with_w;  // micro-batches
    for (const Event& event : events) {
      if (event.kind == Event::Kind::kBackwardP2) with_w.insert(event.micro_batch);
      if (event.kind == Event::Kind::kBackwardP1 && event.part > 0) inside += with_w.contains(event.micro_batch);
    }
  }
  EXPECT_GT(inside, 0);
  const Comparison result = compare(trace);
  EXPECT_TRUE(result.replayed);
  expect_close_bytes(result, kMicroBatches);
}

TEST(Compare, LeavesOutIncompleteSteps) {
  const Trace whole = test::traced_run("", P2Policy::kEnd, "1f1b", 3, 2);
  EXPECT_EQ(compare(whole).steps, 2);
  Trace trace;
  for (const auto kind : {Event::Kind::kForward, Event::Kind::kBackwardP1, Event::Kind::kBackwardP2}) {
    trace = whole;
    std::erase_if(trace.steps[0].events[1],
                  [&](const Event& event) { return event.kind == kind && event.micro_batch == 2; });
    EXPECT_EQ(compare(trace).steps, 1) << static_cast<int>(kind);
  }
  trace.steps.pop_back();
  try {
    compare(trace);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("none of the trace's 1 steps"), std::string::npos) << error.what();
  }
  EXPECT_THROW(compare(Trace{}), Error);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
