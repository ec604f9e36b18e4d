// A rank's accounts of a step: seconds, causes of idle time, memory, and events if they are wanted. Written from what
// the loop tells (LoopObserver), never by the loop itself.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "twobp/core/measure.h"
#include "twobp/nn/device/device.h"
#include "twobp/nn/layer.h"
#include "twobp/pipeline/executor/loop_observer.h"
#include "twobp/pipeline/memory/memory_meter.h"
#include "twobp/pipeline/observer.h"
#include "twobp/pipeline/stage.h"
#include "twobp/pipeline/step_request.h"

namespace twobp {

// Times of a rank's F, I and W, which follow each other in its compute stream, by its device's own clock. The host's
// clock would not do, because the host only launches the work and runs ahead of it. On a CPU, where a call lasts as
// long as its work, all of this does nothing.
class DeviceTimes {
 public:
  // Seconds of a step on the device's clock.
  struct Totals {
    double busy = 0;       // of F, I and W
    double optimizer = 0;  // of gradients that were applied between them
    std::array<double, kIdleCauses> idle{};
  };

  // Begins a step on `device`; all earlier work on it is done. `on`: false while a step is recorded as a graph, because
  // the device never reaches the events recorded then.
  void start(const Device& device, bool on);
  // Times an F or I of a stage (an index into the argument of take()), from open to close, without the time between
  // pause and resume. `before`: the cause if the device was idle before it.
  void open(double StageTimes::*seconds, int stage, IdleCause before);
  void pause();
  void resume();
  void close() { pause(); }
  // Times a W, or an update, between F and I or while one is paused: call them before and after launching it.
  DeviceEvent begin() { return on_ ? record() : DeviceEvent(); }
  void end_p2(int stage, const DeviceEvent& begin);
  void end_update(const DeviceEvent& begin);
  // Whether any op was timed.
  bool any() const { return !spans_.empty(); }
  // Call when all work is done. Replaces each stage's seconds, which are the host's, by the device's.
  Totals take(std::vector<StageTimes>& stages);

 private:
  struct Span {
    double StageTimes::*seconds;  // null: of an update
    int stage;
    IdleCause before;
    DeviceEvent begin, end;
  };

  // Events of earlier steps are recorded anew, since making them takes longer.
  DeviceEvent record();

  bool on_ = false;
  DeviceStream compute_;
  DeviceEvent step_;
  Span open_{};
  std::vector<Span> spans_;
  std::vector<DeviceEvent> events_;
  size_t used_ = 0;  // of events_, in this step
};

// Records what a rank does in a step, event by event. Records nothing unless someone asked for it. Only the rank's
// thread uses it.
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
  // From now on, the calls are about the other one of two.
  void turn_passes() { std::swap(open_, other_); }

  // One unit of backward-p2.
  void backward_p2(Layer& leaf, const std::string& layer_name, Event event);
  void idle(IdleCause cause, double begin, double end);
  // Idle from the end of the last event. Messages may arrive before a rank's first F.
  void start_up(double end);
  // A part of the optimizer that ran before its time, within or between other events.
  void early_update(double begin, double end);
  void message(Event::Kind kind, int stage, int peer, int micro_batch, int64_t bytes, double begin);

 private:
  void add(Event event);

  int rank_;
  MemoryMeter& meter_;
  bool on_ = false;
  double begin_ = 0;  // of the step
  Event open_, other_;
  int early_updates_ = 0;
  std::vector<Event> events_;
  std::unordered_map<const Layer*, std::string> names_;  // of leaves
};

// Fills a rank's events so that they last from the step's begin to its end. The rank is idle while its thread wakes up,
// and after `done`.
void stretch_to_step(std::vector<Event>& events, double begin, double done, double end);

struct RankAccount {
  RankTimes times;
  std::vector<Event> events;
  std::vector<StageTimes> stages;  // of this rank, in their order
  std::vector<MemoryUse> stage_memory;
  MemoryUse memory;
  std::map<int, std::vector<int64_t>> experts;  // tokens of each expert, by layer of the model
};

class Accounts : public LoopObserver {
 public:
  // The stages outlive it.
  Accounts(int rank, const std::vector<std::unique_ptr<Stage>>& stages, MemoryMeter& meter, Device device);

  // A step begins now. `timed`: its ops are launched one by one. Work before a second call is start-up.
  void begin_step(bool want_events, bool timed);
  // The device has done what was launched.
  void device_is_done();
  void last_update_begins();
  void last_update_ends(const std::vector<Waited>& waits);
  // The step has ended, with this number of instructions.
  RankAccount end_step(size_t instructions);

  void op_begins(Op op, int stage, int micro_batch, bool w_pending) override;
  void op_pauses() override;
  void op_resumes() override;
  void op_ends(int units) override;
  void turn_passes() override {
    std::swap(op_, other_);
    events_.turn_passes();
  }
  void experts_chosen(int layer, const at::Tensor& tokens) override;
  void w_begins() override;
  void w_ends(const MadeUnit& unit, std::span<const WUnits> together) override;
  void update_begins() override;
  void update_ends() override;
  void wait_begins(bool w_pending, WaitCause cause) override;
  void wait_ends() override;
  void message_begins() override { message_ = events_.now(); }
  void message_ends(const Message& message) override;

 private:
  size_t local(int stage) const;
  void idle(IdleCause cause, double begin, double end);
  void log_w(const MadeUnit& unit, std::span<const WUnits> together, double begin, double end);

  int rank_;
  const std::vector<std::unique_ptr<Stage>>& stages_;
  MemoryMeter& meter_;
  Device device_;
  EventLog events_;
  DeviceTimes device_times_;

  // Of the current step.
  RankTimes times_;
  std::vector<StageTimes> stage_times_;
  std::map<int, std::vector<int64_t>> experts_;  // see RankAccount
  ProductTime products_;                         // at its begin
  int64_t allocations_ = 0;
  bool started_ = false;  // the first F has begun
  bool timed_ = true;
  // The begin of what is under way, as now_seconds().
  struct Op {
    double StageTimes::*seconds = nullptr;
    size_t stage = 0;
    double since = 0;
  } op_, other_;
  double w_ = 0;
  double update_ = 0;
  ProductTime w_products_;
  DeviceEvent w_event_;
  DeviceEvent update_event_;
  double wait_ = 0;
  bool for_sums_ = false;
  IdleCause cause_ = IdleCause::kNothing;
  double message_ = 0;
};

}  // namespace twobp
