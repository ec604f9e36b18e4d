#include "twobp/trace/trace.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <set>
#include <tuple>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/core/text.h"

namespace twobp {
namespace {

using nlohmann::ordered_json;

constexpr int kProcess = 1;
int rank_track(size_t rank) {
  return kStepTrack + 1 + static_cast<int>(rank);
}

std::string_view category_of(const Event& event) {
  switch (event.kind) {
    case Event::Kind::kForward:
      return "F";
    case Event::Kind::kBackwardP1:
      return "I";
    case Event::Kind::kBackwardP2:
      return "W";
    case Event::Kind::kOptimizer:
      return "optimizer";
    case Event::Kind::kIdle:
      return "idle";
    case Event::Kind::kSend:
    case Event::Kind::kReceive:
      return "message";
  }
  fail("unknown kind of event");
}

constexpr int64_t kMostSteps = 100;  // a viewer is slow to open more

bool parse_step(std::string_view text, int64_t& step) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), step);
  return error == std::errc() && end == text.data() + text.size() && step >= 1;
}

// "3", or "3-5" for several micro-batches that ran as one.
std::string micro_batches(const Event& event, int slices) {
  const std::string first = micro_batch_name(event.micro_batch, slices);
  if (event.count == 1) return first;
  return concat(first, '-', micro_batch_name(event.micro_batch + event.count - 1, slices));
}

// The stages whose ops appear in a rank's events, in order.
std::set<int> stages_of(const std::vector<Event>& events) {
  std::set<int> stages;
  for (const Event& event : events) {
    if (event.stage >= 0) stages.insert(event.stage);
  }
  return stages;
}

std::string_view idle_text(IdleCause cause) {
  constexpr std::array<std::string_view, kIdleCauses> texts = {"start-up", "waiting for a message", "nothing to fill",
                                                               "waiting for tokens of experts",
                                                               "waiting for other ranks"};
  return texts.at(static_cast<size_t>(cause));
}

class Writer {
 public:
  explicit Writer(const Trace& trace) : trace_(trace) {}

  std::string run() {
    if (!trace_.steps.empty()) origin_ = trace_.steps.front().begin;
    describe();
    for (const StepReport& step : trace_.steps) {
      slice(kStepTrack, concat("step ", step.step), "step", step.begin, step.end, {{"loss", step.loss}});
      for (const ExpertTokens& experts : step.experts) {
        counter(concat("fullest expert of ", experts.layer), kStepTrack, step.begin,
                {{"tokens over the mean", experts.imbalance()}});
      }
      messages_.clear();
      for (size_t rank = 0; rank < step.events.size(); ++rank) {
        for (const Event& event : step.events[rank]) add(step, rank, event);
      }
    }
    return out_.dump(-1, ' ', /*ensure_ascii=*/true, ordered_json::error_handler_t::replace) + "\n";
  }

 private:
  double microseconds(double seconds) const { return (seconds - origin_) * 1e6; }

  void metadata(const char* name, int track, ordered_json args) {
    out_.push_back({{"ph", "M"}, {"name", name}, {"pid", kProcess}, {"tid", track}, {"args", std::move(args)}});
  }

  void describe() {
    metadata("process_name", kStepTrack, {{"name", "twobp: " + trace_.title}});
    metadata("thread_name", kStepTrack, {{"name", "steps"}});
    metadata("thread_sort_index", kStepTrack, {{"sort_index", kStepTrack}});
    if (trace_.steps.empty()) return;
    const auto& ranks = trace_.steps.front().events;
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      std::vector<std::string> stages;
      for (const int stage : stages_of(ranks[rank])) stages.push_back(std::to_string(stage));
      metadata("thread_name", rank_track(rank),
               {{"name", concat("rank ", rank, stages.size() == 1 ? " (stage " : " (stages ", join(stages), ")")}});
      metadata("thread_sort_index", rank_track(rank), {{"sort_index", rank_track(rank)}});
    }
  }

  void slice(int track, const std::string& name, std::string_view category, double begin, double end,
             ordered_json args) {
    out_.push_back({{"ph", "X"},
                    {"name", name},
                    {"cat", category},
                    {"pid", kProcess},
                    {"tid", track},
                    {"ts", microseconds(begin)},
                    {"dur", (end - begin) * 1e6},
                    {"args", std::move(args)}});
  }

  void counter(const std::string& name, int track, double at, ordered_json args) {
    out_.push_back({{"ph", "C"},
                    {"name", name},
                    {"pid", kProcess},
                    {"tid", track},
                    {"ts", microseconds(at)},
                    {"args", std::move(args)}});
  }

  // An arrow ends within the slice of the send or of the receive. Both ends carry the same id.
  void arrow(const char* phase, size_t rank, const Event& event, int id) {
    ordered_json end = {{"ph", phase},
                        {"name", "message"},
                        {"cat", "message"},
                        {"id", id},
                        {"pid", kProcess},
                        {"tid", rank_track(rank)},
                        {"ts", microseconds((event.begin + event.end) / 2)}};
    if (*phase == 'f') end["bp"] = "e";
    out_.push_back(std::move(end));
  }

  void add(const StepReport& step, size_t rank, const Event& event) {
    ordered_json args = {{"step", step.step}};
    if (event.stage >= 0) args["stage"] = event.stage;
    if (event.micro_batch >= 0) args["micro_batch"] = event.micro_batch;
    if (event.count > 1) args["micro_batches"] = event.count;
    if (!event.name.empty()) args["layer"] = event.name;
    if (event.part > 0) args["part"] = event.part;
    if (event.peer >= 0) {
      args[event.kind == Event::Kind::kSend ? "to_stage" : "from_stage"] = event.peer;
      args["bytes"] = event.bytes;
    }
    args["held_bytes"] = event.held;
    args["total_bytes"] = event.total;
    args["peak_bytes"] = event.peak;
    slice(rank_track(rank), event_name(event, trace_.slices), category_of(event), event.begin, event.end,
          std::move(args));
    counter(concat("memory of rank ", rank), rank_track(rank), event.end,
            {{"weights, gradients, optimizer", event.total - event.held}, {"activations and stash", event.held}});
    if (event.peer >= 0) message(step.step, rank, event);
  }

  // Ranks are written one after the other, so the end that comes first is kept here until the other comes.
  void message(int64_t step, size_t rank, const Event& event) {
    const bool send = event.kind == Event::Kind::kSend;
    const Message key = {step, send ? event.stage : event.peer, send ? event.peer : event.stage, event.micro_batch};
    const auto found = messages_.find(key);
    if (found == messages_.end()) {
      messages_[key] = {rank, event};
      return;
    }
    const auto& [other_rank, other] = found->second;
    ++arrows_;
    arrow("s", send ? rank : other_rank, send ? event : other, arrows_);
    arrow("f", send ? other_rank : rank, send ? other : event, arrows_);
    messages_.erase(found);
  }

  using Message = std::tuple<int64_t, int, int, int>;  // step, sending and receiving stage, micro-batch

  const Trace& trace_;
  double origin_ = 0;
  int arrows_ = 0;
  std::map<Message, std::pair<size_t, Event>> messages_;
  ordered_json out_ = ordered_json::array();
};

}  // namespace

std::string trace_json(const Trace& trace) {
  return Writer(trace).run();
}

TraceSteps choose_trace_steps(const std::string& text, const TraceSteps& run) {
  TWOBP_CHECK(run.first <= run.last, "--trace-steps: the run has no step left to do");
  // The first step of a run touches its memory for the first time, so it is not typical.
  if (text.empty()) {
    const int64_t last = std::min(run.last, run.first + 3);
    return {std::min(last, run.first + 1), last};
  }
  TraceSteps steps;
  const size_t dash = text.find('-');
  const bool parsed = dash == std::string::npos ? parse_step(text, steps.first) && parse_step(text, steps.last)
                                                : parse_step(std::string_view(text).substr(0, dash), steps.first) &&
                                                      parse_step(std::string_view(text).substr(dash + 1), steps.last);
  TWOBP_CHECK(parsed && steps.first <= steps.last, "--trace-steps: '", text,
              "' is not a range of steps: give one as 5, several as 3-5, counted from 1");
  TWOBP_CHECK(steps.last - steps.first < kMostSteps, "--trace-steps: ", text, " are ", steps.last - steps.first + 1,
              " steps: at most ", kMostSteps, " can be recorded");
  TWOBP_CHECK(steps.first >= run.first && steps.last <= run.last, "--trace-steps: ", text,
              " is not within the steps of this run, ", run.first, " to ", run.last);
  return steps;
}

void TraceRecorder::on_step(const StepReport& report) {
  if (!wants_events(report.step)) return;
  reports_.push_back(report);
  complete_ = report.step == steps_.last;
}

std::string event_name(const Event& event, int slices) {
  switch (event.kind) {
    case Event::Kind::kForward:
      return concat('F', micro_batches(event, slices));
    case Event::Kind::kBackwardP1:
      return concat('I', micro_batches(event, slices));
    case Event::Kind::kBackwardP2:
      return concat('W', micro_batches(event, slices), event.name.empty() ? "" : " ", event.name);
    case Event::Kind::kOptimizer:
      return "optimizer";
    case Event::Kind::kIdle:
      return concat("idle: ", idle_text(event.cause));
    case Event::Kind::kSend:
      return "send";
    case Event::Kind::kReceive:
      return "receive";
  }
  fail("unknown kind of event");
}

}  // namespace twobp
