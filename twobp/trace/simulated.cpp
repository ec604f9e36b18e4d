#include "twobp/trace/simulated.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "twobp/core/check.h"

namespace twobp {
namespace {

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
  RankConverter(double step_seconds, double byte_unit) : step_(step_seconds), byte_unit_(byte_unit) {}

  std::vector<Event> run(const RankSimulation& rank) {
    fixed_ = std::llround(rank.fixed_bytes * byte_unit_);
    for (const SimulatedOp& op : rank.timeline) {
      if (op.op == Op::kBackwardP2) p2_seconds_[{op.stage, op.micro_batch}] += op.end - op.begin;
    }
    double ops = 0;
    for (const SimulatedOp& op : rank.timeline) {
      wait_until(op.begin, !started_                           ? IdleCause::kStartUp
                           : pending_ > step_ * kRoundingError ? IdleCause::kMessage
                                                               : IdleCause::kNothing);
      started_ = true;
      compute(op);
      ops += op.end - op.begin;
    }
    const double done = step_ - rank.idle[static_cast<size_t>(IdleCause::kTail)];
    wait_until(done - (rank.busy - ops), IdleCause::kNothing);  // sums of gradients
    optimizer(done);
    wait_until(step_, IdleCause::kTail);
    mark_peak(rank);
    return std::move(events_);
  }

 private:
  int64_t bytes() const { return std::max<int64_t>(0, std::llround(held_ * byte_unit_)); }

  void add(Event event, double end) {
    event.begin = now_;
    event.end = now_ = end;
    event.held = bytes();
    event.total = event.held + fixed_;
    event.peak = std::max(event.peak, event.total);
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
    event.part = op.part;
    if (op.op == Op::kBackwardP1 && op.part == 0) pending_ += p2_seconds_[{op.stage, op.micro_batch}];
    if (op.op == Op::kBackwardP2) pending_ -= op.end - op.begin;
    held_ = op.held_bytes;
    now_ = op.begin;
    add(std::move(event), op.end);
  }

  void mark_peak(const RankSimulation& rank) {
    if (rank.peak.stage < 0) return;
    const auto event = std::find_if(events_.begin(), events_.end(), [&](const Event& each) {
      return each.end >= rank.peak.seconds * (1 - kRoundingError);
    });
    if (event == events_.end()) return;
    event->peak = std::max<int64_t>(event->peak, std::llround(rank.total_peak_bytes() * byte_unit_));
  }

  double step_;
  double byte_unit_;
  bool started_ = false;
  double now_ = 0;
  double held_ = 0;                                   // in the costs' unit
  int64_t fixed_ = 0;                                 // bytes
  std::map<std::pair<int, int>, double> p2_seconds_;  // by stage and micro-batch
  double pending_ = 0;                                // seconds of W
  std::vector<Event> events_;
};

}  // namespace

StepReport simulated_step(const Simulation& simulation, double byte_unit) {
  StepReport report;
  report.step = 1;
  report.end = simulation.step_seconds;
  for (size_t rank = 0; rank < simulation.ranks.size(); ++rank) {
    RankConverter converter(simulation.step_seconds, byte_unit);
    report.events.push_back(converter.run(simulation.ranks[rank]));
  }
  return report;
}

}  // namespace twobp
