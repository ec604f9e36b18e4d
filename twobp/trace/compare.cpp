#include "twobp/trace/compare.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/schedule/simulate/in_process.h"
#include "twobp/trace/simulated.h"

namespace twobp {
namespace {

using Kind = Event::Kind;

double seconds_of(const Event& event) {
  return event.end - event.begin;
}

// The last batch of an epoch may have fewer micro-batches, and an interrupted step fewer ops.
bool is_whole(const StepReport& step, const Schedule& schedule) {
  std::map<std::pair<Kind, int>, std::set<int>> ran;  // micro-batches by op and stage
  for (const auto& events : step.events) {
    for (const Event& event : events) {
      if (event.kind > Kind::kBackwardP2) continue;
      const auto end = std::min<int64_t>(schedule.micro_batches, int64_t{event.micro_batch} + std::max(1, event.count));
      for (int m = std::max(0, event.micro_batch); m < end; ++m) ran[{event.kind, event.stage}].insert(m);
    }
  }
  const auto all_of_them = [&](Kind kind, int stage) {
    const auto found = ran.find({kind, stage});
    if (found == ran.end()) return kind != Kind::kForward;  // frozen: it has no I and no W
    return std::cmp_equal(found->second.size(), schedule.micro_batches);
  };
  for (int s = 0; s < schedule.stages; ++s) {
    for (const Kind kind : {Kind::kForward, Kind::kBackwardP1, Kind::kBackwardP2}) {
      if (!all_of_them(kind, s)) return false;
    }
  }
  return true;
}

class Comparer {
 public:
  explicit Comparer(const Trace& trace) : run_(*trace.run) {
    for (const StepReport& step : trace.steps) {
      if (is_whole(step, run_.schedule)) steps_.push_back(&step);
    }
    TWOBP_CHECK(!steps_.empty(), "none of the trace's ", trace.steps.size(), " steps has all ",
                run_.schedule.micro_batches, " micro-batches of its schedule: trace other steps");
  }

  Comparison run() {
    result_.steps = static_cast<int>(steps_.size());
    measure_costs();
    measure_messages();
    SimulationOptions options = in_process_simulation();
    options.message_seconds = result_.message_seconds;
    options.cap_per_rank = run_.cap_per_rank;
    options.timeline = true;
    result_.simulation = simulate(run_.schedule, result_.costs, options);
    result_.step = simulated_step(result_.simulation, 1);
    compare_times();
    compare_bytes(options);
    return std::move(result_);
  }

 private:
  int ranks() const { return run_.schedule.rank_count(); }
  double step_count() const { return static_cast<double>(steps_.size()); }

  void measure_costs() {
    result_.costs = run_.costs;
    const size_t stages = run_.schedule.stages;
    const double ops = step_count() * run_.schedule.micro_batches * stages / result_.costs.size();
    std::vector<double> optimizer(ranks(), 0);
    std::vector<double> fixed(ranks(), 0);
    for (StageCost& cost : result_.costs) cost.forward = cost.backward_p1 = cost.backward_p2 = 0;
    for (const StepReport* step : steps_) {
      for (int rank = 0; rank < ranks(); ++rank) {
        for (const Event& event : step->events[rank]) {
          fixed[rank] = std::max(fixed[rank], static_cast<double>(event.total - event.held));
          if (event.kind == Kind::kOptimizer) optimizer[rank] += seconds_of(event) / step_count();
          if (event.kind > Kind::kBackwardP2) continue;
          StageCost& cost = result_.costs[cost_index(run_.schedule, result_.costs, event.stage, event.micro_batch)];
          double& seconds = event.kind == Kind::kForward      ? cost.forward
                            : event.kind == Kind::kBackwardP1 ? cost.backward_p1
                                                              : cost.backward_p2;
          seconds += seconds_of(event) / ops;
        }
      }
    }
    std::vector<bool> seen(ranks(), false);
    for (size_t stage = 0; stage < stages; ++stage) {
      const int rank = run_.schedule.rank_of_stage[stage];
      result_.costs[stage].optimizer = seen[rank] ? 0 : optimizer[rank];
      result_.costs[stage].fixed_bytes = seen[rank] ? 0 : fixed[rank];
      seen[rank] = true;
    }
  }

  // A message's time is from the end of its send until the receiver has it. It is known only if the receiver was
  // waiting.
  void measure_messages() {
    std::vector<double> times;
    for (const StepReport* step : steps_) {
      std::map<std::tuple<int, int, int>, double> sent;  // (from stage, to stage, micro-batch)
      for (const auto& events : step->events) {
        for (const Event& event : events) {
          if (event.kind == Kind::kSend) sent[{event.stage, event.peer, event.micro_batch}] = event.end;
        }
      }
      for (const auto& events : step->events) {
        for (size_t i = 1; i < events.size(); ++i) {
          const Event& event = events[i];
          if (event.kind != Kind::kReceive || events[i - 1].kind != Kind::kIdle) continue;
          const auto found = sent.find({event.peer, event.stage, event.micro_batch});
          if (found != sent.end()) times.push_back(std::max(0.0, event.end - found->second));
        }
      }
    }
    if (!times.empty()) result_.message_seconds = median(std::move(times));
  }

  void compare_times() {
    result_.step_seconds.predicted = result_.simulation.step_seconds;
    result_.idle.resize(ranks());
    for (int rank = 0; rank < ranks(); ++rank) {
      result_.idle[rank].predicted = result_.simulation.idle_fraction(rank);
    }
    for (const StepReport* step : steps_) {
      result_.step_seconds.measured += step->seconds() / step_count();
      for (int rank = 0; rank < ranks(); ++rank) {
        double busy = 0;
        for (const Event& event : step->events[rank]) {
          if (event.kind <= Kind::kOptimizer) busy += seconds_of(event);
        }
        result_.idle[rank].measured += (1 - busy / step->seconds()) / step_count();
      }
    }
  }

  void compare_bytes(SimulationOptions options) {
    result_.peak_bytes.resize(ranks());
    const auto predict = [&](const Simulation& simulation) {
      for (int rank = 0; rank < ranks(); ++rank) {
        double& predicted = result_.peak_bytes[rank].predicted;
        predicted = std::max(predicted, simulation.ranks[rank].total_peak_bytes());
      }
    };
    const bool fills = fills_waits(run_.schedule, result_.costs, options);
    result_.replayed =
        fills && std::all_of(steps_.begin(), steps_.end(), [&](const auto* step) { return can_be_replayed(*step); });
    if (!result_.replayed) predict(result_.simulation);
    options.timeline = false;
    for (const StepReport* step : steps_) {
      if (result_.replayed) {
        options.recorded = recorded(*step);
        predict(simulate(run_.schedule, result_.costs, options));
      }
      for (int rank = 0; rank < ranks(); ++rank) {
        double& measured = result_.peak_bytes[rank].measured;
        for (const Event& event : step->events[rank]) {
          measured = std::max(measured, static_cast<double>(event.peak));
        }
      }
    }
  }

  // A replay needs W of single micro-batches, each in as many pieces as the profile says. W of several micro-batches at
  // once has no place in such an order.
  bool can_be_replayed(const StepReport& step) const {
    std::map<std::pair<int, int>, int> pieces;  // (stage, micro-batch)
    for (const auto& events : step.events) {
      for (const Event& event : events) {
        if (event.kind != Kind::kBackwardP2) continue;
        if (event.count > 1) return false;
        ++pieces[{event.stage, event.micro_batch}];
      }
    }
    for (int stage = 0; stage < run_.schedule.stages; ++stage) {
      const StageCost& cost = run_.costs[stage];
      int expected = cost.layers.empty() ? cost.p2_units : 0;
      for (const LayerCost& layer : cost.layers) expected += layer.p2_units;
      for (int m = 0; m < run_.schedule.micro_batches; ++m) {
        const auto found = pieces.find({stage, m});
        if ((found == pieces.end() ? 0 : found->second) != expected) return false;
      }
    }
    return true;
  }

  // An F or I is placed where it began. W that interrupts it made room for its later layers and may be its own. It
  // appears in the simulation for the same reason.
  static std::vector<std::vector<RecordedOp>> recorded(const StepReport& step) {
    std::vector<std::vector<RecordedOp>> all;
    for (const auto& events : step.events) {
      auto& list = all.emplace_back();
      for (const Event& event : events) {
        if (event.kind == Kind::kBackwardP2) {
          list.push_back({Op::kBackwardP2, event.stage, event.micro_batch, 1});
        } else if (event.kind == Kind::kReceive) {
          const Op op = event.peer < event.stage ? Op::kRecvForward : Op::kRecvBackward;
          list.push_back({op, event.stage, event.micro_batch, 0});
        } else if (event.kind < Kind::kBackwardP2 && event.part == 0) {
          const Op op = event.kind == Kind::kForward ? Op::kForward : Op::kBackwardP1;
          list.push_back({op, event.stage, event.micro_batch, 0});
        }
      }
    }
    return all;
  }

  const TracedRun& run_;
  std::vector<const StepReport*> steps_;  // the whole ones
  Comparison result_;
};

}  // namespace

Comparison compare(const Trace& trace) {
  TWOBP_CHECK(trace.run, "the trace does not describe its run: record it with 'twobp train --trace'");
  return Comparer(trace).run();
}

}  // namespace twobp
