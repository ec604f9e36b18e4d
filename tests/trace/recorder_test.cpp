// Tests the choice of recorded steps, and their names.
#include "tests/trace/support.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::error_of;
using test::expect_contains;

void expect_range(const TraceSteps& steps, int64_t first, int64_t last) {
  EXPECT_EQ(steps.first, first);
  EXPECT_EQ(steps.last, last);
}

TEST(ChooseTraceSteps, AreTheSecondToTheFourthOrTheLast) {
  expect_range(choose_trace_steps("", {1, 100}), 2, 4);
  expect_range(choose_trace_steps("", {1, 4}), 2, 4);
  expect_range(choose_trace_steps("", {1, 3}), 2, 3);
  expect_range(choose_trace_steps("", {1, 2}), 2, 2);
  expect_range(choose_trace_steps("", {1, 1}), 1, 1);       // there is no other step
  expect_range(choose_trace_steps("", {51, 100}), 52, 54);  // a resumed run
}

TEST(ChooseTraceSteps, FollowTheRequest) {
  expect_range(choose_trace_steps("3-5", {1, 8}), 3, 5);
  expect_range(choose_trace_steps("7", {1, 8}), 7, 7);
  expect_range(choose_trace_steps("1-8", {1, 8}), 1, 8);
}

TEST(ChooseTraceSteps, RefuseImpossibleRequests) {
  for (const char* text :
       {"x", "3-", "-3", "3-x", "5-3", "0", "0-2", "3-5-7", " 3", "3 ", "1e3", "+3", "99999999999999999999"}) {
    expect_contains(error_of([&] { choose_trace_steps(text, {1, 8}); }), {"--trace-steps", text});
  }
  expect_contains(error_of([] { choose_trace_steps("7-9", {1, 8}); }), {"7-9", "1 to 8"});
  expect_contains(error_of([] { choose_trace_steps("3", {5, 8}); }), {"5 to 8"});
  expect_contains(error_of([] { choose_trace_steps("1-101", {1, 1000}); }), {"101 steps", "100"});
  expect_contains(error_of([] { choose_trace_steps("", {9, 8}); }), {"no step left"});
}

TEST(TraceRecorder, KeepsTheChosenSteps) {
  TraceRecorder recorder({3, 4});
  StepReport report;
  for (int64_t step = 1; step <= 5; ++step) {
    EXPECT_EQ(recorder.wants_events(step), step == 3 || step == 4);
    EXPECT_EQ(recorder.complete(), step == 5);
    report.step = step;
    recorder.on_step(report);
  }
  ASSERT_EQ(recorder.reports().size(), 2U);
  EXPECT_EQ(recorder.reports()[0].step, 3);
  EXPECT_EQ(recorder.reports()[1].step, 4);
}

TEST(EventName, DescribesTheEvent) {
  Event event;
  event.micro_batch = 3;
  EXPECT_EQ(event_name(event), "F3");
  event.kind = Event::Kind::kBackwardP1;
  EXPECT_EQ(event_name(event), "I3");
  event.kind = Event::Kind::kBackwardP2;
  event.name = "model.layers.2.mlp.down_proj";
  EXPECT_EQ(event_name(event), "W3 model.layers.2.mlp.down_proj");
  event.count = 2;
  EXPECT_EQ(event_name(event), "W3-4 model.layers.2.mlp.down_proj");
  event.kind = Event::Kind::kIdle;
  event.cause = IdleCause::kMessage;
  EXPECT_EQ(event_name(event), "idle: waiting for a message");
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
