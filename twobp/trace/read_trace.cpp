#include "twobp/trace/read_trace.h"

#include <cmath>
#include <map>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/core/json_text.h"
#include "twobp/core/text.h"
#include "twobp/trace/trace.h"

namespace twobp {
namespace {

using nlohmann::ordered_json;

constexpr int kMostDepth = 16;
constexpr uint64_t kMostBytes = 1ULL << 30;

class TraceReader {
 public:
  explicit TraceReader(const std::string& origin) : origin_(origin) {}

  Trace read(const std::string& text) {
    const auto all = parse_json<ordered_json>(text, origin_, kMostDepth);
    TWOBP_CHECK(all.is_array(), origin_, ": not a trace that 'twobp train --trace' wrote: that is a JSON list");
    for (const ordered_json& each : all) {
      TWOBP_CHECK(each.is_object() && each.contains("ph") && each.contains("name"), origin_,
                  ": an entry of the trace is not an event: it has no \"ph\" or no \"name\"");
      if (each.at("ph") == "M" && each.at("name") == "twobp_run") describe(each);
    }
    TWOBP_CHECK(trace_.run, origin_,
                ": does not describe its run: record the trace with 'twobp train CONFIG --trace FILE'");
    const size_t ranks = trace_.run->schedule.ranks.size();
    for (const ordered_json& each : all) {
      if (each.at("ph") != "X" || track(each) != kStepTrack) continue;
      add_step(each);
      // Memory is only allocated in proportion to the size of the file.
      TWOBP_CHECK(trace_.steps.size() <= all.size() / ranks, origin_, ": ", all.size(),
                  " entries are too few for more than ", all.size() / ranks, " steps on ", ranks,
                  " ranks: the trace is damaged");
    }
    TWOBP_CHECK(!trace_.steps.empty(), origin_, ": the trace has no steps");
    for (const ordered_json& each : all) {
      if (each.at("ph") == "X" && track(each) != kStepTrack) add_event(each);
    }
    return std::move(trace_);
  }

 private:
  // A number of an event or of its arguments. It must exist.
  double number(const ordered_json& object, const char* name) const {
    const auto found = object.is_object() ? object.find(name) : object.end();
    TWOBP_CHECK(found != object.end() && found->is_number() && std::isfinite(found->get<double>()), origin_,
                ": an event of the trace has no number \"", name, "\"");
    return found->get<double>();
  }
  int64_t whole(const ordered_json& object, const char* name, int64_t low, int64_t high) const {
    const double value = number(object, name);
    TWOBP_CHECK(value == std::floor(value) && value >= static_cast<double>(low) && value <= static_cast<double>(high),
                origin_, ": \"", name, "\" of an event is ", value, ", not a whole number from ", low, " to ", high);
    return static_cast<int64_t>(value);
  }
  int whole_or(const ordered_json& object, const char* name, int64_t low, int64_t high, int missing) const {
    return object.contains(name) ? static_cast<int>(whole(object, name, low, high)) : missing;
  }
  int64_t bytes(const ordered_json& object, const char* name) const { return whole(object, name, 0, int64_t{1} << 53); }
  std::string text(const ordered_json& object, const char* name) const {
    const auto found = object.find(name);
    TWOBP_CHECK(found != object.end() && found->is_string(), origin_, ": an event of the trace has no text \"", name,
                "\"");
    return found->get<std::string>();
  }
  int64_t track(const ordered_json& event) const { return whole(event, "tid", 1, INT32_MAX); }
  const ordered_json& arguments(const ordered_json& event) const {
    const auto found = event.find("args");
    TWOBP_CHECK(found != event.end() && found->is_object(), origin_, ": an event of the trace has no args");
    return *found;
  }

  void describe(const ordered_json& event) {
    const ordered_json& args = arguments(event);
    trace_.title = text(args, "title");
    TWOBP_CHECK(args.contains("run"), origin_, ": the description of the run is empty");
    trace_.run = parse_traced_run(args.at("run"), origin_);
    if (!args.contains("facts") || !args.at("facts").is_array()) return;
    for (const ordered_json& fact : args.at("facts")) {
      TWOBP_CHECK(fact.is_array() && fact.size() == 2 && fact[0].is_string() && fact[1].is_string(), origin_,
                  ": facts are pairs of texts");
      trace_.facts.emplace_back(fact[0].get<std::string>(), fact[1].get<std::string>());
    }
  }

  void add_step(const ordered_json& event) {
    const std::string name = text(event, "name");
    StepReport step;
    const std::string digits = name.rfind("step ", 0) == 0 ? name.substr(5) : "";
    TWOBP_CHECK(!digits.empty() && digits.size() <= 15 && digits.find_first_not_of("0123456789") == std::string::npos,
                origin_, ": '", name.substr(0, 40), "' is not the name of a step");
    step.step = std::stoll(digits);
    step.begin = number(event, "ts") * 1e-6;
    step.end = step.begin + number(event, "dur") * 1e-6;
    TWOBP_CHECK(step.end > step.begin, origin_, ": step ", step.step, " takes no time");
    const ordered_json& args = arguments(event);
    if (args.contains("loss") && args.at("loss").is_number()) step.loss = args.at("loss").get<double>();
    step.events.resize(trace_.run->schedule.ranks.size());
    TWOBP_CHECK(step_at_.try_emplace(step.step, trace_.steps.size()).second, origin_, ": step ", step.step,
                " is there twice");
    trace_.steps.push_back(std::move(step));
  }

  Event::Kind kind_of(const std::string& category, const ordered_json& args) const {
    using Kind = Event::Kind;
    if (category == "F") return Kind::kForward;
    if (category == "I") return Kind::kBackwardP1;
    if (category == "W") return Kind::kBackwardP2;
    if (category == "optimizer") return Kind::kOptimizer;
    if (category == "idle") return Kind::kIdle;
    if (category == "message") return args.contains("to_stage") ? Kind::kSend : Kind::kReceive;
    fail(origin_, ": '", category.substr(0, 40), "' is not a category of events of a rank");
  }

  IdleCause cause_of(const std::string& name) const {
    for (int cause = 0; cause < kIdleCauses; ++cause) {
      Event event;
      event.kind = Event::Kind::kIdle;
      event.cause = static_cast<IdleCause>(cause);
      if (event_name(event) == name) return event.cause;
    }
    fail(origin_, ": '", name.substr(0, 60), "' is not a cause of idle time");
  }

  void add_event(const ordered_json& json) {
    const Schedule& schedule = trace_.run->schedule;
    const int64_t rank = track(json) - kStepTrack - 1;
    TWOBP_CHECK(rank < schedule.rank_count(), origin_, ": an event is on track ", track(json), ", but the run has ",
                schedule.rank_count(), " ranks");
    const ordered_json& args = arguments(json);
    const auto found = step_at_.find(whole(args, "step", 0, int64_t{1} << 53));
    TWOBP_CHECK(found != step_at_.end(), origin_, ": an event belongs to a step that is not in the trace");
    StepReport& step = trace_.steps[found->second];

    Event event;
    event.kind = kind_of(text(json, "cat"), args);
    event.begin = number(json, "ts") * 1e-6;
    const double seconds = number(json, "dur") * 1e-6;
    TWOBP_CHECK(seconds >= 0, origin_, ": an event takes ", seconds, " s");
    event.end = event.begin + seconds;
    const int last_stage = schedule.stages - 1;
    const int all = schedule.micro_batches;
    const bool op = event.kind <= Event::Kind::kBackwardP2;
    const bool message = event.kind == Event::Kind::kSend || event.kind == Event::Kind::kReceive;
    if (op || message) {
      event.stage = static_cast<int>(whole(args, "stage", 0, last_stage));
      event.micro_batch = static_cast<int>(whole(args, "micro_batch", 0, all - 1));
      event.count = whole_or(args, "micro_batches", 1, all - event.micro_batch, 1);
      TWOBP_CHECK(schedule.rank_of_stage[event.stage] == rank, origin_, ": an event of stage ", event.stage,
                  " is on rank ", rank, ", but the schedule places this stage on rank ",
                  schedule.rank_of_stage[event.stage]);
    }
    event.part = whole_or(args, "part", 0, INT32_MAX, 0);
    if (args.contains("layer")) event.name = text(args, "layer");
    if (message) {
      event.peer =
          static_cast<int>(whole(args, event.kind == Event::Kind::kSend ? "to_stage" : "from_stage", 0, last_stage));
      event.bytes = bytes(args, "bytes");
    }
    if (event.kind == Event::Kind::kIdle) event.cause = cause_of(text(json, "name"));
    event.held = bytes(args, "held_bytes");
    event.total = bytes(args, "total_bytes");
    event.peak = bytes(args, "peak_bytes");
    auto& events = step.events[rank];
    TWOBP_CHECK(events.empty() || event.begin >= events.back().begin, origin_, ": the events of rank ", rank,
                " in step ", step.step, " are out of order");
    events.push_back(std::move(event));
  }

  const std::string& origin_;
  Trace trace_;
  std::map<int64_t, size_t> step_at_;  // by number
};

}  // namespace

Trace parse_trace(const std::string& text, const std::string& origin) {
  return TraceReader(origin).read(text);
}

Trace read_trace(const std::string& path) {
  return parse_trace(read_text(path, kMostBytes), path);
}

}  // namespace twobp
