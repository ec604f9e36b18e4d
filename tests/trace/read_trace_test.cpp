// Tests that a trace that is written and read again is the same run. Foreign or damaged traces are refused with one
// line.
#include "twobp/trace/read_trace.h"

#include <random>

#include <nlohmann/json.hpp>

#include "tests/trace/support.h"
#include "twobp/core/text.h"
#include "twobp/trace/trace.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;

std::string message_of(const std::string& text) {
  try {
    parse_trace(text, "run.json");
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// Expects an error of one line that begins with the name of the file.
void expect_refused(const std::string& text, const std::vector<std::string>& parts) {
  const std::string message = message_of(text);
  EXPECT_EQ(message.rfind("run.json: ", 0), 0U) << message;
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  for (const auto& part : parts) EXPECT_NE(message.find(part), std::string::npos) << message;
}

const json& description(const json& all) {
  for (const json& each : all) {
    if (each.at("name") == "twobp_run") return each.at("args").at("run");
  }
  throw std::runtime_error("no description");
}
json& description(json& all) {
  return const_cast<json&>(description(static_cast<const json&>(all)));
}

TEST(ReadTrace, IsTheRunThatWasWritten) {
  Trace trace = test::traced_run(test::kHostileName, P2Policy::kFill, "1f1b", 4, 2, {2, 2, 2, 2}, {0, 1, 2, 3});
  trace.run->cap_per_rank = {1e6, 0, 2.5e6, 1};
  const Trace read = parse_trace(trace_json(trace), "run.json");
  EXPECT_EQ(read.facts, trace.facts);
  const Schedule& schedule = trace.run->schedule;
  ASSERT_TRUE(read.run);
  EXPECT_EQ(read.run->schedule.name, schedule.name);
  EXPECT_EQ(read.run->schedule.policy, schedule.policy);
  EXPECT_EQ(read.run->schedule.rank_of_stage, schedule.rank_of_stage);
  EXPECT_EQ(read.run->schedule.ranks, schedule.ranks);
  EXPECT_EQ(read.run->cap_per_rank, trace.run->cap_per_rank);
  ASSERT_EQ(read.run->costs.size(), trace.run->costs.size());
  for (size_t s = 0; s < read.run->costs.size(); ++s) {
    const StageCost& expected = trace.run->costs[s];
    EXPECT_EQ(read.run->costs[s].forward, expected.forward);
    EXPECT_EQ(read.run->costs[s].p2_units, expected.p2_units);
    EXPECT_EQ(read.run->costs[s].output_bytes, expected.output_bytes);
    ASSERT_EQ(read.run->costs[s].layers.size(), expected.layers.size());
    for (size_t i = 0; i < expected.layers.size(); ++i) {
      EXPECT_EQ(read.run->costs[s].layers[i].p1_held, expected.layers[i].p1_held);
      EXPECT_EQ(read.run->costs[s].layers[i].stash, expected.layers[i].stash);
      EXPECT_EQ(read.run->costs[s].layers[i].p2_units, expected.layers[i].p2_units);
    }
  }
  ASSERT_EQ(read.steps.size(), trace.steps.size());
  const double origin = trace.steps[0].begin;
  for (size_t i = 0; i < read.steps.size(); ++i) {
    EXPECT_EQ(read.steps[i].step, trace.steps[i].step);
    EXPECT_EQ(read.steps[i].loss, trace.steps[i].loss);
    EXPECT_NEAR(read.steps[i].begin, trace.steps[i].begin - origin, 1e-9);
    EXPECT_NEAR(read.steps[i].seconds(), trace.steps[i].seconds(), 1e-9);
    ASSERT_EQ(read.steps[i].events.size(), trace.steps[i].events.size());
    for (size_t r = 0; r < read.steps[i].events.size(); ++r) {
      const auto& expected = trace.steps[i].events[r];
      const auto& events = read.steps[i].events[r];
      ASSERT_EQ(events.size(), expected.size());
      for (size_t e = 0; e < events.size(); ++e) {
        EXPECT_EQ(event_name(events[e]), event_name(expected[e]));
        EXPECT_EQ(events[e].kind, expected[e].kind);
        EXPECT_EQ(events[e].stage, expected[e].kind <= Event::Kind::kBackwardP2 ? expected[e].stage : events[e].stage);
        EXPECT_EQ(events[e].part, expected[e].part);
        EXPECT_EQ(events[e].peer, expected[e].peer);
        EXPECT_EQ(events[e].bytes, expected[e].bytes);
        EXPECT_EQ(events[e].held, expected[e].held);
        EXPECT_EQ(events[e].total, expected[e].total);
        EXPECT_EQ(events[e].peak, expected[e].peak);
        EXPECT_NEAR(events[e].begin, expected[e].begin - origin, 1e-9);
        EXPECT_NEAR(events[e].end - events[e].begin, expected[e].end - expected[e].begin, 1e-9);
      }
    }
  }
}

// The schedules have ranges, placed W, and several stages per rank.
TEST(ReadTrace, ReadsAnySchedule) {
  for (const P2Policy policy : {P2Policy::kOff, P2Policy::kEnd, P2Policy::kCooldown}) {
    const Trace trace = test::traced_run("", policy, "gpipe", 3, 1);
    EXPECT_EQ(parse_trace(trace_json(trace), "run.json").run->schedule.ranks, trace.run->schedule.ranks)
        << policy_name(policy);
  }
  const Trace v = test::traced_run("", P2Policy::kPlaced, "zb-v", 4, 1, {2, 2, 2, 2}, {0, 1, 1, 0});
  const Trace read = parse_trace(trace_json(v), "run.json");
  EXPECT_EQ(read.run->schedule.ranks, v.run->schedule.ranks);
  EXPECT_EQ(read.run->schedule.rank_of_stage, (std::vector<int>{0, 1, 1, 0}));
}

TEST(ReadTrace, RefusesOtherFiles) {
  expect_refused("", {"not JSON"});
  expect_refused("{\"traceEvents\": []}", {"twobp train --trace"});
  expect_refused("[1, 2]", {"not an event"});
  expect_refused("[]", {"does not describe its run", "twobp train"});
  expect_refused(R"([{"ph": "X", "name": "x", "ts": 0, "dur": 1, "tid": 1}])", {"does not describe its run"});
  expect_refused(std::string(100000, '['), {"nested deeper"});
  Trace without = test::traced_run();
  without.run.reset();
  expect_refused(trace_json(without), {"does not describe its run", "--trace FILE"});
  const std::string whole = trace_json(test::traced_run());
  expect_refused(whole.substr(0, whole.size() / 2), {"not JSON"});
}

TEST(ReadTrace, RefusesImpossibleDescriptions) {
  const json good = json::parse(trace_json(test::traced_run()));
  ASSERT_EQ(message_of(good.dump()), "");
  const auto refused = [&](const auto& change, const std::vector<std::string>& parts) {
    json all = good;
    change(description(all));
    expect_refused(all.dump(), parts);
  };
  refused([](json& run) { run["format"] = 2; }, {"format 2"});
  refused([](json& run) { run.erase("costs"); }, {"no costs"});
  refused([](json& run) { run["costs"].erase(0); }, {"costs of 1 stages", "2"});
  refused([](json& run) { run["costs"][0]["forward"] = -1; }, {"forward", "-1"});
  refused([](json& run) { run["costs"][0]["p2_units"] = 1000000000; }, {"p2_units", "1000000000"});
  refused([](json& run) { run["costs"][0]["layers"][0]["stash"] = "much"; }, {"stash", "much"});
  refused([](json& run) { run["schedule"]["p2"] = "fil"; }, {"'fil'", "'fill'"});
  refused([](json& run) { run["schedule"]["micro_batches"] = 2000000000; }, {"micro_batches"});
  refused([](json& run) { run["schedule"]["rank_of_stage"] = {0, 7}; }, {"rank_of_stage", "7"});
  refused([](json& run) { run["schedule"]["ranks"][0][0] = {"SEND_F", 0, 0}; }, {"SEND_F", "not an op"});
  refused([](json& run) { run["schedule"]["ranks"][0][0] = {"F", 9, 0}; }, {"stage", "9"});
  refused([](json& run) { run["schedule"]["ranks"][0].erase(0); }, {"schedule"});
  refused([](json& run) { std::swap(run["schedule"]["ranks"][1][0], run["schedule"]["ranks"][1][1]); }, {"schedule"});
  refused([](json& run) { run["cap_per_rank"] = {1}; }, {"cap_per_rank has 1"});
  refused([](json& run) { run["schedule"]["ranks"].push_back(json::array()); }, {"rank 2", "no stage"});
  for (const char* peak : {"forward_peak", "p1_peak", "p2_peak"}) {
    refused([&](json& run) { run["costs"][1]["layers"][0][peak] = -1; }, {peak, "-1"});
  }
}

// The description has more steps and ranks than the file has room for.
TEST(ReadTrace, RefusesMoreStepsThanTheEventsAllow) {
  json all = json::parse(trace_json(test::traced_run("", P2Policy::kOff, "1f1b", 1, 1)));
  json steps = json::array();
  for (const json& each : all) {
    if (each.at("ph") != "X" || each.at("cat") != "step") continue;
    for (int i = 1; i <= 1000; ++i) {
      steps.push_back(each);
      steps.back()["name"] = "step " + std::to_string(1000 + i);
    }
  }
  ASSERT_EQ(steps.size(), 1000U);
  for (const json& step : steps) all.push_back(step);
  expect_refused(all.dump(), {"steps on 2 ranks"});
}

// The path identifies a schedule file.
TEST(ReadTrace, ShortensALongName) {
  Trace trace = test::traced_run();
  trace.run->schedule.name = std::string(300, '\xff') + "/schedules/best.csv";
  const std::string name = parse_trace(trace_json(trace), "run.json").run->schedule.name;
  EXPECT_TRUE(name.ends_with("/schedules/best.csv")) << name;
  EXPECT_TRUE(name.starts_with("...")) << name;
}

TEST(ReadTrace, RefusesImpossibleEvents) {
  const json good = json::parse(trace_json(test::traced_run()));
  const auto refused = [&](const char* category, const auto& change, const std::vector<std::string>& parts) {
    json all = good;
    for (json& each : all) {
      if (each.at("ph") != "X" || each.at("cat") != category) continue;
      change(each);
      return expect_refused(all.dump(), parts);
    }
    ADD_FAILURE() << "no " << category;
  };
  refused("F", [](json& event) { event["args"]["stage"] = 5; }, {"stage", "5"});
  refused("F", [](json& event) { event["args"]["stage"] = 1 - event["args"]["stage"].get<int>(); },
          {"is on rank", "the schedule places this stage on rank"});
  refused("F", [](json& event) { event["args"].erase("micro_batch"); }, {"micro_batch"});
  refused("F", [](json& event) { event["args"]["micro_batch"] = 1.5; }, {"1.5"});
  refused("I", [](json& event) { event["dur"] = -1; }, {"takes -"});
  refused("W", [](json& event) { event["args"]["micro_batches"] = 1e9; }, {"micro_batches"});
  refused("W", [](json& event) { event["tid"] = 99; }, {"track 99", "2 ranks"});
  refused("W", [](json& event) { event["cat"] = "X"; }, {"'X'", "category"});
  refused("idle", [](json& event) { event["name"] = "idle: lunch"; }, {"lunch"});
  refused("F", [](json& event) { event["args"]["peak_bytes"] = -5; }, {"peak_bytes", "-5"});
  refused("F", [](json& event) { event["args"]["step"] = 77; }, {"step that is not in"});
  refused("step", [](json& event) { event["name"] = "step x"; }, {"step x"});
  refused("step", [](json& event) { event["dur"] = 0; }, {"no time"});
}

// Bytes are changed at random. The result is a run or one line of error, and nothing else.
TEST(ReadTrace, SurvivesDamage) {
  const std::string good = trace_json(test::traced_run("", P2Policy::kEnd, "1f1b", 2, 1));
  std::mt19937 random(7);
  int refused = 0;
  for (int i = 0; i < 300; ++i) {
    std::string text = good;
    for (int change = 0; change < 3; ++change) {
      const size_t at = random() % text.size();
      if (random() % 2 == 0) {
        text[at] = static_cast<char>("0123456789-.,:\"{}[]eE "[random() % 22]);
      } else {
        text.erase(at, 1 + random() % 4);
      }
    }
    const std::string message = message_of(text);
    if (message.empty()) continue;
    ++refused;
    EXPECT_EQ(message.rfind("run.json: ", 0), 0U) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  }
  EXPECT_GT(refused, 200);
}

TEST(ReadTrace, NamesTheFile) {
  try {
    read_trace("/no/such/trace.json");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("/no/such/trace.json"), std::string::npos) << error.what();
  }
  EXPECT_THROW(read_trace("/"), Error);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
