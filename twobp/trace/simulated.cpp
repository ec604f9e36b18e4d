#include "twobp/trace/simulated.h"

#include <algorithm>
#include <cmath>

#include "twobp/core/check.h"

namespace twobp {
namespace {

constexpr double kMicroBatch = 1000;  // "bytes"
constexpr double kRoundingError = 1e-9;

Event::Kind kind_of(Op op) {
  switch (op) {
    case Op::kForward:
      return Event::Kind::kForward;
    case Op::kBackwardP1:
      return Event::Kind::kBackwardP1;
    case Op::kBackwardP2:
      return Event::Kind::kBackwardP2;
    default:
      fail("a simulated timeline holds F, I and W, not ", op_name(op));
  }
}

class RankConverter {
 public:
  RankConverter(const std::vector<StageCost>& costs, bool has_backward, double step_seconds)
      : costs_(costs), has_backward_(has_backward), step_(step_seconds) {}

  std::vector<Event> run(const RankSimulation& rank) {
    for (const SimulatedOp& op : rank.timeline) {
      wait_until(op.begin, !started_                           ? IdleCause::kStartUp
                           : pending_ > step_ * kRoundingError ? IdleCause::kMessage
                                                               : IdleCause::kNothing);
      started_ = true;
      compute(op);
    }
    optimizer(step_ - rank.idle[static_cast<size_t>(IdleCause::kTail)]);
    wait_until(step_, IdleCause::kTail);
    return std::move(events_);
  }

 private:
  void add(Event event, double end) {
    event.begin = now_;
    event.end = now_ = end;
    event.held = event.total = std::llround(held_ * kMicroBatch);
    event.peak = std::max(event.peak, event.held);
    events_.push_back(std::move(event));
  }

  void wait_until(double time, IdleCause cause) {
    if (time <= now_ + step_ * kRoundingError) return;
    Event event;
    event.kind = Event::Kind::kIdle;
    event.cause = cause;
    add(std::move(event), time);
  }

  void optimizer(double end) {
    if (end <= now_ + step_ * kRoundingError) return;
    Event event;
    event.kind = Event::Kind::kOptimizer;
    add(std::move(event), end);
  }

  void compute(const SimulatedOp& op) {
    Event event;
    event.kind = kind_of(op.op);
    event.stage = op.stage;
    event.micro_batch = op.micro_batch;
    const double p2 = costs_[op.stage].backward_p2;
    if (op.op == Op::kForward) held_ += 1;
    event.peak = std::llround(held_ * kMicroBatch);
    if (op.op == Op::kForward && !has_backward_) held_ -= 1;
    if (op.op == Op::kBackwardP1) pending_ += p2;
    if (op.op == Op::kBackwardP2) {
      pending_ -= op.end - op.begin;
      held_ -= p2 > 0 ? (op.end - op.begin) / p2 : 1;
    }
    now_ = op.begin;
    add(std::move(event), op.end);
  }

  const std::vector<StageCost>& costs_;
  bool has_backward_;
  double step_;
  bool started_ = false;
  double now_ = 0;
  double held_ = 0;     // micro-batches
  double pending_ = 0;  // seconds of W
  std::vector<Event> events_;
};

}  // namespace

StepReport simulated_step(const Schedule& schedule, const std::vector<StageCost>& costs,
                          const Simulation& simulation) {
  const bool has_backward = std::any_of(schedule.ranks.begin(), schedule.ranks.end(), [](const auto& rank) {
    return std::any_of(rank.begin(), rank.end(), [](const Instruction& instruction) {
      return is_compute(instruction.op) && instruction.op != Op::kForward;
    });
  });
  StepReport report;
  report.step = 1;
  report.end = simulation.step_seconds;
  for (const RankSimulation& rank : simulation.ranks) {
    report.events.push_back(RankConverter(costs, has_backward, simulation.step_seconds).run(rank));
  }
  return report;
}

}  // namespace twobp
