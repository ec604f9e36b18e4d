// Tests the Trace Event Format: every object has the fields that its phase requires, tracks do not overlap,
// and arrows meet slices. Also tests which steps are recorded.
#include "twobp/trace/trace.h"

#include <map>
#include <set>

#include <nlohmann/json.hpp>

#include "tests/pipeline/support.h"
#include "twobp/core/measure.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;
using test::error_of;
using test::expect_contains;

std::vector<StepReport> run_steps(Pipeline& pipeline, const StepPlan& plan, int steps) {
  TraceRecorder recorder({1, steps});
  for (int i = 0; i < steps; ++i) {
    StepRequest options = test::step_request();
    options.step = i + 1;
    options.want_events = recorder.wants_events(i + 1);
    options.update = test::update_by([](int) {
      const double begin = now_seconds();
      while (now_seconds() < begin + 2e-4) {
      }
      return std::vector<Waited>();
    });
    recorder.on_step(pipeline.run(plan, test::random_batch(plan.schedule.micro_batches), options));
  }
  return recorder.reports();
}

// Two steps of a LLaMa with three blocks on two stages.
Trace real_trace(const std::string& title = "a title") {
  const ModelSpec model = test::small_llama(3);  // 8 layers
  Pipeline pipeline(model, test::no_costs(model), test::options_of({4, 4}));
  Trace trace;
  trace.title = title;
  trace.steps = run_steps(pipeline, pipeline.plan("1f1b", 3, P2Policy::kFill, {P2Batching::kLoop, 0}), 2);
  return trace;
}

// This name tries to break out of strings, scripts and tags, and ends in invalid UTF-8.
const std::string kHostileName =
    "</script><script>document.body.dataset.broken='yes'</script><!-- \"'\\ \n\x01 & \xe2\x80\xa8 \xff";

json with_phase(const json& all, const std::string& phase) {
  json some = json::array();
  for (const json& each : all) {
    if (each.at("ph") == phase) some.push_back(each);
  }
  return some;
}

TEST(TraceJson, EveryObjectHasItsFields) {
  const json all = json::parse(trace_json(real_trace()));
  ASSERT_TRUE(all.is_array());
  std::set<std::string> phases;
  for (const json& each : all) {
    const auto phase = each.at("ph").get<std::string>();
    phases.insert(phase);
    EXPECT_TRUE(each.at("name").is_string());
    EXPECT_TRUE(each.at("pid").is_number_integer());
    EXPECT_TRUE(each.at("tid").is_number_integer());
    if (phase == "M") {
      EXPECT_TRUE(each.at("args").is_object());
      continue;
    }
    EXPECT_GE(each.at("ts").get<double>(), 0);
    if (phase == "X") {
      EXPECT_GE(each.at("dur").get<double>(), 0);
      EXPECT_TRUE(each.at("cat").is_string());
    }
    if (phase == "C") {
      for (const auto& [series, value] : each.at("args").items()) EXPECT_TRUE(value.is_number()) << series;
    }
    if (phase == "s" || phase == "f") {
      EXPECT_TRUE(each.at("id").is_number_integer());
      EXPECT_TRUE(each.at("cat").is_string());
    }
  }
  EXPECT_EQ(phases, (std::set<std::string>{"C", "M", "X", "f", "s"}));
}

TEST(TraceJson, HasEveryEventOnItsRanksTrack) {
  const Trace trace = real_trace();
  const json slices = with_phase(json::parse(trace_json(trace)), "X");
  std::map<int, std::vector<json>> tracks;
  for (const json& each : slices) tracks[each.at("tid")].push_back(each);
  ASSERT_EQ(tracks.size(), 3U);  // the steps, and two ranks
  EXPECT_EQ(tracks[1].size(), 2U);
  EXPECT_EQ(tracks[1][1].at("name"), "step 2");
  for (int rank = 0; rank < 2; ++rank) {
    size_t at = 0;
    for (const StepReport& step : trace.steps) {
      for (const Event& event : step.events[rank]) {
        const json& slice = tracks[rank + 2].at(at++);
        EXPECT_EQ(slice.at("name"), event_name(event));
        EXPECT_NEAR(slice.at("ts").get<double>(), (event.begin - trace.steps[0].begin) * 1e6, 1e-3);
        EXPECT_NEAR(slice.at("dur").get<double>(), (event.end - event.begin) * 1e6, 1e-3);
        EXPECT_EQ(slice.at("args").at("step"), step.step);
        if (event.micro_batch >= 0) {
          EXPECT_EQ(slice.at("args").at("micro_batch"), event.micro_batch);
        }
      }
    }
    EXPECT_EQ(at, tracks[rank + 2].size());
    double last = 0;
    for (const json& slice : tracks[rank + 2]) {
      EXPECT_GE(slice.at("ts").get<double>(), last - 1e-3);
      last = slice.at("ts").get<double>() + slice.at("dur").get<double>();
    }
  }
}

TEST(TraceJson, ArrowsGoFromSendsToReceives) {
  const json all = json::parse(trace_json(real_trace()));
  const auto slice_at = [&](const json& arrow) -> std::string {
    for (const json& slice : with_phase(all, "X")) {
      const double begin = slice.at("ts");
      const double ts = arrow.at("ts");
      if (slice.at("tid") == arrow.at("tid") && begin <= ts && ts <= begin + slice.at("dur").get<double>()) {
        return slice.at("name");
      }
    }
    return "nothing";
  };
  std::map<int, json> starts;
  for (const json& arrow : with_phase(all, "s")) {
    EXPECT_TRUE(starts.emplace(arrow.at("id").get<int>(), arrow).second);
    EXPECT_EQ(slice_at(arrow), "send");
  }
  const json ends = with_phase(all, "f");
  EXPECT_EQ(ends.size(), 2U * 2 * 3);  // steps, directions, micro-batches
  EXPECT_EQ(starts.size(), ends.size());
  for (const json& arrow : ends) {
    ASSERT_TRUE(starts.contains(arrow.at("id").get<int>()));
    EXPECT_EQ(arrow.at("bp"), "e");
    EXPECT_EQ(slice_at(arrow), "receive");
    EXPECT_NE(starts.at(arrow.at("id").get<int>()).at("tid"), arrow.at("tid"));
  }
}

TEST(TraceJson, CountsMemory) {
  const Trace trace = real_trace();
  std::map<std::string, int64_t> most;
  for (const json& each : with_phase(json::parse(trace_json(trace)), "C")) {
    int64_t total = 0;
    for (const auto& [series, value] : each.at("args").items()) total += value.get<int64_t>();
    int64_t& peak = most[each.at("name").get<std::string>()];
    peak = std::max(peak, total);
  }
  ASSERT_EQ(most.size(), 2U);
  for (int rank = 0; rank < 2; ++rank) {
    int64_t expected = 0;
    for (const StepReport& step : trace.steps) {
      for (const Event& event : step.events[rank]) expected = std::max(expected, event.total);
    }
    EXPECT_EQ(most[concat("memory of rank ", rank)], expected);
  }
}

TEST(TraceJson, ShowsTheFullestExpert) {
  Trace trace = real_trace();
  trace.steps[0].experts = {{"model.layers.0.mlp", {1, 0, 5, 2}}};
  json found;
  for (const json& each : with_phase(json::parse(trace_json(trace)), "C")) {
    if (each.at("name") == "fullest expert of model.layers.0.mlp") found.push_back(each.at("args"));
  }
  EXPECT_EQ(found, json::array({{{"tokens over the mean", 2.5}}}));
}

TEST(TraceJson, EscapesNames) {
  Trace trace = real_trace(kHostileName);
  for (Event& event : trace.steps[0].events[0]) {
    if (event.kind == Event::Kind::kBackwardP2) event.name = kHostileName;
  }
  const std::string text = trace_json(trace);
  for (const char c : text) EXPECT_TRUE((c >= ' ' && c <= '~') || c == '\n');
  const json all = json::parse(text);
  const auto title = all[0].at("args").at("name").get<std::string>();
  EXPECT_EQ(title.rfind("twobp: </script>", 0), 0U) << title;
}

TEST(TraceJson, IsAnEmptyArrayWithoutSteps) {
  EXPECT_TRUE(json::parse(trace_json({})).is_array());
}

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
