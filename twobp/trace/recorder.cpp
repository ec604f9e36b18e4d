#include "twobp/trace/recorder.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <set>

#include "twobp/core/check.h"
#include "twobp/core/text.h"

namespace twobp {
namespace {

constexpr int64_t kMostSteps = 100;  // a page with more is unreadable and slow to open

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

}  // namespace

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

std::string_view idle_text(IdleCause cause) {
  constexpr std::array<std::string_view, kIdleCauses> texts = {"start-up", "waiting for a message", "nothing to fill",
                                                               "waiting for other ranks"};
  return texts.at(static_cast<size_t>(cause));
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

std::vector<int> stages_of(const std::vector<Event>& events) {
  std::set<int> stages;
  for (const Event& event : events) {
    if (event.stage >= 0) stages.insert(event.stage);
  }
  return {stages.begin(), stages.end()};
}

}  // namespace twobp
