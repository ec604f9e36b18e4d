// Tests the events of a step. They are disjoint and in order, from the beginning of the step to its end. Their
// durations agree with the sums. Every op of the schedule occurs once, whatever interrupts it.
#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "tests/pipeline/support.h"
#include "twobp/core/measure.h"
#include "twobp/pipeline/executor/rank_executor.h"
#include "twobp/pipeline/stage.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::options_of;
using test::random_batch;
using test::small_llama;
using test::step_request;

struct Case {
  std::string schedule;
  P2Policy policy;
  P2Batching batching = P2Batching::kLoop;
  int64_t cap = 0;
  std::vector<int> split = {3, 2, 3};
};

std::string name_of(const Case& c) {
  return concat(c.schedule, ", p2 ", policy_name(c.policy), ", ", batching_name(c.batching), ", cap ", c.cap, ", ",
                c.split.size(), " stages");
}

void PrintTo(const Case& c, std::ostream* out) {
  *out << name_of(c);
}

constexpr int kMicroBatches = 4;

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const char* schedule : {"1f1b", "gpipe"}) {
    for (const P2Policy policy : {P2Policy::kOff, P2Policy::kEnd, P2Policy::kCooldown, P2Policy::kFill}) {
      for (const int64_t cap : {0, 1}) {  // a cap of one byte: old W runs before every layer
        all.push_back({schedule, policy, P2Batching::kLoop, cap});
      }
      all.push_back({schedule, policy, P2Batching::kConcat, 0});
      all.push_back({schedule, policy, P2Batching::kLoop, 0, {8}});
    }
  }
  return all;
}

StepReport run(const Case& c, bool want_events = true) {
  const ModelSpec model = small_llama(3);  // 8 layers
  Profile profile = test::no_costs(model);
  for (auto& [kind, cost] : profile) cost.forward_peak = cost.p1_peak = 1;  // each layer needs room
  Pipeline pipeline(model, profile, options_of(c.split));
  pipeline.meter().reset_peaks();
  StepRequest options = step_request();
  options.want_events = want_events;
  options.update = test::update_by([](int) -> std::vector<Waited> {
    // The rank is busy, then waits, then is busy again.
    const double begin = now_seconds();
    while (now_seconds() < begin + 1e-3) {
    }
    const double wait = now_seconds();
    while (now_seconds() < wait + 1e-3) {
    }
    const double end = now_seconds();
    while (now_seconds() < end + 1e-3) {
    }
    return {{WaitCause::kNorm, wait, end}};
  });
  return pipeline.run(pipeline.plan(c.schedule, kMicroBatches, c.policy, {c.batching, c.cap}),
                      random_batch(kMicroBatches), options);
}

double seconds_of(const std::vector<Event>& events, Event::Kind kind) {
  double sum = 0;
  for (const Event& event : events) {
    if (event.kind == kind) sum += event.end - event.begin;
  }
  return sum;
}

double idle_of(const std::vector<Event>& events, IdleCause cause) {
  double sum = 0;
  for (const Event& event : events) {
    if (event.kind == Event::Kind::kIdle && event.cause == cause) sum += event.end - event.begin;
  }
  return sum;
}

class Events : public ::testing::TestWithParam<Case> {};

TEST_P(Events, AreDisjointAndTileTheStep) {
  const StepReport report = run(GetParam());
  ASSERT_EQ(report.events.size(), GetParam().split.size());
  for (const auto& events : report.events) {
    ASSERT_FALSE(events.empty());
    EXPECT_EQ(events.front().begin, report.begin);
    EXPECT_EQ(events.back().end, report.end);
    double last = report.begin;
    for (const Event& event : events) {
      EXPECT_GE(event.begin, last);
      EXPECT_GE(event.end, event.begin);
      last = event.end;
    }
  }
}

// The events are disjoint, so equal sums mean that the gaps between them are the executor's own time.
TEST_P(Events, DurationsAgreeWithTheSums) {
  const StepReport report = run(GetParam());
  constexpr double kRounding = 1e-9;
  for (size_t r = 0; r < report.events.size(); ++r) {
    const auto& events = report.events[r];
    const StageTimes& stage = report.stages[r];
    const RankTimes& rank = report.ranks[r];
    EXPECT_NEAR(seconds_of(events, Event::Kind::kForward), stage.forward, kRounding);
    EXPECT_NEAR(seconds_of(events, Event::Kind::kBackwardP1), stage.backward_p1, kRounding);
    EXPECT_NEAR(seconds_of(events, Event::Kind::kBackwardP2), stage.backward_p2, kRounding);
    // `finish` reads the clock by itself, so only the sum is exact.
    EXPECT_NEAR(seconds_of(events, Event::Kind::kOptimizer) + idle_of(events, IdleCause::kTail),
                rank.optimizer + rank.idle[static_cast<int>(IdleCause::kTail)], kRounding);
    EXPECT_GE(seconds_of(events, Event::Kind::kOptimizer), rank.optimizer - kRounding);
    EXPECT_GE(idle_of(events, IdleCause::kTail), 1e-3) << "the wait within `finish`";
    for (const IdleCause cause : {IdleCause::kMessage, IdleCause::kNothing}) {
      EXPECT_NEAR(idle_of(events, cause), rank.idle[static_cast<int>(cause)], kRounding);
    }
    // Until the first F, there are only start-up and messages.
    const auto first =
        std::find_if(events.begin(), events.end(), [](const Event& e) { return e.kind == Event::Kind::kForward; });
    ASSERT_NE(first, events.end());
    EXPECT_NEAR(first->begin - report.begin, rank.idle[static_cast<int>(IdleCause::kStartUp)], kRounding);
    for (auto event = events.begin(); event != first; ++event) {
      EXPECT_TRUE(event->kind == Event::Kind::kReceive ||
                  (event->kind == Event::Kind::kIdle && event->cause == IdleCause::kStartUp));
    }
  }
}

TEST_P(Events, ContainEveryOpOnce) {
  const StepReport report = run(GetParam());
  for (int r = 0; r < static_cast<int>(report.events.size()); ++r) {
    std::map<std::tuple<Event::Kind, int>, int> parts;  // of F and I, by micro-batch
    std::set<std::tuple<int, int, int>> units;          // of W: micro-batch, layer, leaf
    int optimizer_parts = 0;
    for (const Event& event : report.events[r]) {
      if (event.kind == Event::Kind::kForward || event.kind == Event::Kind::kBackwardP1) {
        EXPECT_EQ(event.stage, r);
        EXPECT_EQ(event.part, (parts[{event.kind, event.micro_batch}]++));
      }
      if (event.kind == Event::Kind::kOptimizer) {
        EXPECT_EQ(event.part, optimizer_parts++);
      }
      if (event.kind != Event::Kind::kBackwardP2) continue;
      EXPECT_EQ(event.stage, r);
      EXPECT_FALSE(event.name.empty());
      if (GetParam().batching == P2Batching::kLoop) {
        EXPECT_EQ(event.count, 1);
      }
      for (int m = event.micro_batch; m < event.micro_batch + event.count; ++m) {
        EXPECT_TRUE(units.emplace(m, event.layer, event.unit).second) << "micro-batch " << m << " twice";
      }
    }
    EXPECT_EQ(parts.size(), 2U * kMicroBatches);
    EXPECT_EQ(optimizer_parts, 2);
    EXPECT_EQ(static_cast<int>(units.size()), report.stages[r].p2_units * kMicroBatches);
    for (const auto& [micro_batch, layer, unit] : units) {
      EXPECT_GE(micro_batch, 0);
      EXPECT_LT(micro_batch, kMicroBatches);
      EXPECT_GE(layer, 0);
      EXPECT_GE(unit, 0);
    }
  }
}

TEST_P(Events, MessagesAreSentAndReceivedOnce) {
  const StepReport report = run(GetParam());
  using Message = std::tuple<int, int, int>;  // sending stage, receiving stage, micro-batch
  std::map<Message, Event> sent;
  std::map<Message, Event> received;
  for (const auto& events : report.events) {
    for (const Event& event : events) {
      if (event.kind == Event::Kind::kSend) {
        EXPECT_TRUE(sent.emplace(Message(event.stage, event.peer, event.micro_batch), event).second);
      }
      if (event.kind == Event::Kind::kReceive) {
        EXPECT_TRUE(received.emplace(Message(event.peer, event.stage, event.micro_batch), event).second);
      }
    }
  }
  const size_t boundaries = GetParam().split.size() - 1;
  EXPECT_EQ(sent.size(), 2 * boundaries * kMicroBatches);
  EXPECT_EQ(received.size(), sent.size());
  for (const auto& [message, event] : sent) {
    ASSERT_TRUE(received.contains(message));
    EXPECT_EQ(event.bytes, test::kRows * test::kDim * test::kFloat);
    EXPECT_EQ(received.at(message).bytes, event.bytes);
    EXPECT_GE(received.at(message).end, event.begin);
  }
}

TEST_P(Events, PeaksAreThoseOfTheMeter) {
  const StepReport report = run(GetParam());
  for (size_t r = 0; r < report.events.size(); ++r) {
    int64_t peak = 0;
    int64_t held = 0;
    for (const Event& event : report.events[r]) {
      EXPECT_LE(event.held, event.total);
      EXPECT_LE(event.total, event.peak);
      peak = std::max(peak, event.peak);
      held = std::max(held, event.held);
    }
    EXPECT_EQ(peak, report.rank_memory[r].peak);
    EXPECT_GT(held, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Schedules, Events, ::testing::ValuesIn(cases()), [](const auto& info) {
  std::string name = name_of(info.param);
  std::replace_if(
      name.begin(), name.end(), [](char c) { return !std::isalnum(c); }, '_');
  return name;
});

// A W that makes room runs in the middle of an F: this F is recorded as the parts around it.
TEST(EventParts, MakingRoomWithinAnOpCutsIt) {
  const StepReport report = run({"1f1b", P2Policy::kEnd, P2Batching::kLoop, 1, {4, 4}});
  int cut = 0;
  for (const Event& event : report.events[0]) cut += event.kind != Event::Kind::kOptimizer && event.part > 0;
  EXPECT_GT(cut, 0);
}

TEST(EventParts, AFusedBackwardIsCutByItsW) {
  const StepReport report = run({"1f1b", P2Policy::kOff, P2Batching::kLoop, 0, {4, 4}});
  const auto& events = report.events[1];
  int alternations = 0;
  for (size_t i = 1; i < events.size(); ++i) {
    alternations += events[i - 1].kind == Event::Kind::kBackwardP2 && events[i].kind == Event::Kind::kBackwardP1 &&
                    events[i].part > 0 && events[i].micro_batch == events[i - 1].micro_batch;
  }
  EXPECT_GE(alternations, kMicroBatches);
}

TEST(EventNames, AreThoseOfTheWeights) {
  std::set<std::string> names;
  for (const auto& events : run({"gpipe", P2Policy::kEnd}).events) {
    for (const Event& event : events) names.insert(event.name);
  }
  for (const char* name : {"model.embed_tokens", "model.layers.0.self_attn.q_proj+k_proj+v_proj",
                           "model.layers.2.mlp.down_proj", "lm_head"}) {
    EXPECT_TRUE(names.contains(name)) << name << " is not in " << ::testing::PrintToString(names);
  }
}

TEST(NoEvents, AreRecordedUnlessAskedFor) {
  EXPECT_TRUE(run({"1f1b", P2Policy::kFill}, /*want_events=*/false).events.empty());
}

// A gathered W is recorded with its micro-batches, in any order of their I.
TEST(EventsOfW, NameTheMicroBatchesOfAReorderedSchedule) {
  const ModelSpec model = small_llama(1);
  Pipeline pipeline(model, test::no_costs(model), options_of({static_cast<int>(model.layers.size())}));
  Schedule schedule = pipeline.plan("gpipe", kMicroBatches, P2Policy::kFill).schedule;
  schedule.allow_reorder = true;
  std::vector<int> order = {2, 0, 1, 3};
  for (Instruction& instruction : schedule.ranks[0]) {
    if (instruction.op != Op::kBackwardP1) continue;
    instruction.micro_batch = order.front();
    order.erase(order.begin());
  }
  ASSERT_TRUE(order.empty());
  StepRequest options = step_request();
  options.want_events = true;
  const StepPlan plan = pipeline.plan(schedule, {P2Batching::kConcat, 0, P2Order::kBucket});
  const StepReport report = pipeline.run(plan, random_batch(kMicroBatches), options);
  std::map<std::string, std::vector<int>> told;  // micro-batches by leaf
  for (const Event& event : report.events[0]) {
    if (event.kind != Event::Kind::kBackwardP2) continue;
    for (int i = 0; i < event.count; ++i) told[event.name].push_back(event.micro_batch + i);
  }
  EXPECT_GT(told.size(), 3U);
  for (const auto& [leaf, micro_batches] : told) {
    EXPECT_EQ(micro_batches, (std::vector<int>{2, 0, 1, 3})) << leaf;
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
