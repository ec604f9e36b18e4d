// A rank's accounts of a step: seconds, causes of idle time, memory, and events if they are wanted. Written from what
// the loop tells (LoopObserver), never by the loop itself.
#pragma once

#include <memory>
#include <vector>

#include "twobp/pipeline/executor/device_times.h"
#include "twobp/pipeline/executor/event_log.h"
#include "twobp/pipeline/executor/loop_observer.h"
#include "twobp/pipeline/memory/memory_meter.h"
#include "twobp/pipeline/observer.h"
#include "twobp/pipeline/stage.h"
#include "twobp/pipeline/step_request.h"

namespace twobp {

struct RankAccount {
  RankTimes times;
  std::vector<Event> events;
  std::vector<StageTimes> stages;  // of this rank, in their order
  std::vector<MemoryUse> stage_memory;
  MemoryUse memory;
};

class Accounts : public LoopObserver {
 public:
  // The stages outlive it.
  Accounts(int rank, const std::vector<std::unique_ptr<Stage>>& stages, MemoryMeter& meter, Device device);

  // A step begins now. `timed`: its ops are launched one by one. Work before a second call is start-up.
  void begin_step(bool want_events, bool timed);
  // The device has done what was launched.
  void device_is_done();
  void update_begins();
  void update_ends(const UpdateTimes& update);
  // The step has ended, with this number of instructions.
  RankAccount end_step(size_t instructions);

  void op_begins(Op op, int stage, int micro_batch, bool w_pending) override;
  void op_pauses() override;
  void op_resumes() override;
  void op_ends(int units) override;
  void w_begins() override;
  void w_ends(const MadeUnit& unit, std::span<const WUnits> together) override;
  void wait_begins(bool w_pending) override;
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
  ProductTime products_;  // at its begin
  int64_t allocations_ = 0;
  bool started_ = false;  // the first F has begun
  bool timed_ = true;
  // The begin of what is under way, as now_seconds().
  struct Op {
    double StageTimes::*seconds = nullptr;
    size_t stage = 0;
    double since = 0;
  } op_;
  double w_ = 0;
  ProductTime w_products_;
  DeviceEvent w_event_;
  double wait_ = 0;
  IdleCause cause_ = IdleCause::kNothing;
  double message_ = 0;
};

}  // namespace twobp
