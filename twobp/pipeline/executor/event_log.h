// Records what a rank does in a step, event by event. Records nothing unless someone asked for it. Only the rank's
// thread uses it.
#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "twobp/core/clock.h"
#include "twobp/nn/layer.h"
#include "twobp/pipeline/memory/memory_meter.h"
#include "twobp/pipeline/observer.h"

namespace twobp {

class EventLog {
 public:
  EventLog(int rank, MemoryMeter& meter) : rank_(rank), meter_(meter) {}

  // Begins a step now.
  void start(bool on);
  bool on() const { return on_; }
  // The time, or 0 while off. For times that only events need.
  double now() const { return on_ ? now_seconds() : 0; }
  std::vector<Event> take() { return std::move(events_); }

  // An F, an I or the optimizer, from open to close. Other events may interrupt it between pause and resume. Each
  // stretch becomes an event.
  void open(Event::Kind kind, int stage, int micro_batch, double begin);
  void pause(double at);
  void resume(double at) { open_.begin = at; }
  void close(double at) { pause(at); }

  // One unit of backward-p2.
  void backward_p2(Layer& leaf, const std::string& layer_name, Event event);
  void idle(IdleCause cause, double begin, double end);
  // Idle from the end of the last event. Messages may arrive before a rank's first F.
  void start_up(double end);
  void message(Event::Kind kind, int stage, int peer, int micro_batch, int64_t bytes, double begin);

 private:
  void add(Event event);

  int rank_;
  MemoryMeter& meter_;
  bool on_ = false;
  double begin_ = 0;  // of the step
  Event open_;
  std::vector<Event> events_;
  std::unordered_map<const Layer*, std::string> names_;  // of leaves
};

// Fills a rank's events so that they last from the step's begin to its end. The rank is idle while its thread wakes up,
// and after `done`.
void stretch_to_step(std::vector<Event>& events, double begin, double done, double end);

}  // namespace twobp
