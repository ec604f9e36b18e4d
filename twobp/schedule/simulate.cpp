// A rank's clock moves only with its own ops and with the messages it waits for, and the W it runs in a wait
// changes nothing for others but when it goes on. So no queue of events is needed: ranks run one after the
// other, each up to a message that is not sent yet (walk.h), and a wait is filled once the arrival is known.
#include "twobp/schedule/simulate.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/schedule/validate.h"
#include "twobp/schedule/walk.h"

namespace twobp {
namespace {

// Sums of the same costs in another order differ in the last digits; that must not buy another piece of W.
bool exceeds(double a, double b) {
  return a > b + 1e-9 * std::abs(b);
}

void check_cost(double value, const char* what, int stage) {
  TWOBP_CHECK(std::isfinite(value) && value >= 0, "cost of stage ", stage, ": ", what, " is ", value,
              ", must be finite and not negative");
}

void check_inputs(const Schedule& schedule, const std::vector<StageCost>& costs,
                  const SimulationOptions& options) {
  TWOBP_CHECK(static_cast<int>(costs.size()) == schedule.stages, "simulating '", schedule.name, "' needs ",
              schedule.stages, " costs, one a stage, got ", costs.size());
  for (int stage = 0; stage < schedule.stages; ++stage) {
    const StageCost& cost = costs[stage];
    check_cost(cost.forward, "forward", stage);
    check_cost(cost.backward_p1, "backward_p1", stage);
    check_cost(cost.backward_p2, "backward_p2", stage);
    check_cost(cost.optimizer, "optimizer", stage);
    check_cost(cost.activation_bytes, "activation_bytes", stage);
    check_cost(cost.stash_bytes, "stash_bytes", stage);
    TWOBP_CHECK(cost.p2_units >= 1, "cost of stage ", stage, ": p2_units is ", cost.p2_units,
                ", must be at least 1");
  }
  TWOBP_CHECK(std::isfinite(options.message_seconds) && options.message_seconds >= 0, "message_seconds is ",
              options.message_seconds, ", must be finite and not negative");
  TWOBP_CHECK(
      options.cap_per_rank.empty() || static_cast<int>(options.cap_per_rank.size()) == schedule.rank_count(),
      "cap_per_rank has ", options.cap_per_rank.size(), " entries for ", schedule.rank_count(),
      " ranks: give one a rank, or none");
  for (double cap : options.cap_per_rank) {
    TWOBP_CHECK(std::isfinite(cap) && cap >= 0, "cap_per_rank holds ", cap,
                ", must be finite and not negative (0: no cap)");
  }
}

class Simulator {
 public:
  Simulator(const Schedule& schedule, const std::vector<StageCost>& costs, const SimulationOptions& options)
      : schedule_(schedule), costs_(costs), options_(options) {
    const size_t slots = slot(schedule.stages, 0);
    forward_arrival_.resize(slots);
    backward_arrival_.resize(slots);
    pieces_left_.assign(slots, 0);
    ranks_.resize(schedule.ranks.size());
    result_.ranks.resize(schedule.ranks.size());
    for (int rank = 0; rank < schedule.rank_count(); ++rank) {
      size_t ops = 0;
      for (const Instruction& instruction : schedule.ranks[rank]) {
        if (!is_compute(instruction.op)) continue;
        ops += instruction.op == Op::kBackward ? 2 : static_cast<size_t>(instruction.count);
        has_backward_ |= instruction.op != Op::kForward;
      }
      result_.ranks[rank].timeline.reserve(ops);
      if (!options.cap_per_rank.empty()) ranks_[rank].cap = options.cap_per_rank[rank];
    }
  }

  Simulation run() {
    walk(schedule_, [&](int rank, const Instruction& instruction, int m) {
      step(rank, instruction.op, instruction.stage, m);
    });
    run_optimizer();
    for (const auto& state : ranks_) result_.step_seconds = std::max(result_.step_seconds, state.now);
    for (int rank = 0; rank < schedule_.rank_count(); ++rank) {
      idle(rank, IdleCause::kTail) = result_.step_seconds - ranks_[rank].now;
    }
    return std::move(result_);
  }

 private:
  struct Slot {
    int stage = 0;
    int micro_batch = 0;
  };
  struct RankState {
    double now = 0;
    double bytes = 0;
    double cap = 0;
    int in_flight = 0;
    bool started = false;       // its first F has run
    std::vector<Slot> pending;  // in the order of their I; those before `head` are done, later ones may be
    size_t head = 0;
  };

  size_t slot(int stage, int m) const { return static_cast<size_t>(stage) * schedule_.micro_batches + m; }
  double& idle(int rank, IdleCause cause) { return result_.ranks[rank].idle[static_cast<size_t>(cause)]; }

  void step(int rank, Op op, int stage, int m) {
    switch (op) {
      case Op::kForward:
        return forward(rank, stage, m);
      case Op::kBackwardP1:
        return backward_p1(rank, stage, m);
      case Op::kBackward:
        return backward(rank, stage, m);
      case Op::kBackwardP2:
        return run_pieces(rank, {stage, m}, pieces_left_[slot(stage, m)]);
      case Op::kSendForward:
        forward_arrival_[slot(stage + 1, m)] = ranks_[rank].now + options_.message_seconds;
        return;
      case Op::kSendBackward:
        backward_arrival_[slot(stage - 1, m)] = ranks_[rank].now + options_.message_seconds;
        return;
      case Op::kRecvForward:
        return wait_until(rank, forward_arrival_[slot(stage, m)]);
      case Op::kRecvBackward:
        return wait_until(rank, backward_arrival_[slot(stage, m)]);
    }
  }

  void forward(int rank, int stage, int m) {
    RankState& state = ranks_[rank];
    make_room(rank, costs_[stage].activation_bytes);
    hold(rank, costs_[stage].activation_bytes);
    ++state.in_flight;
    result_.ranks[rank].peak_in_flight = std::max(result_.ranks[rank].peak_in_flight, state.in_flight);
    state.started = true;
    compute(rank, Op::kForward, {stage, m}, costs_[stage].forward);
    if (!has_backward_) {  // evaluation keeps nothing
      hold(rank, -costs_[stage].activation_bytes);
      --state.in_flight;
    }
  }

  void backward_p1(int rank, int stage, int m) {
    const StageCost& cost = costs_[stage];
    make_room(rank, cost.stash_bytes - cost.activation_bytes);
    compute(rank, Op::kBackwardP1, {stage, m}, cost.backward_p1);
    hold(rank, cost.stash_bytes - cost.activation_bytes);
    pieces_left_[slot(stage, m)] = cost.p2_units;
    ranks_[rank].pending.push_back({stage, m});
  }

  // Layer by layer, so that the stash never stands as a whole.
  void backward(int rank, int stage, int m) {
    compute(rank, Op::kBackwardP1, {stage, m}, costs_[stage].backward_p1);
    compute(rank, Op::kBackwardP2, {stage, m}, costs_[stage].backward_p2);
    hold(rank, -costs_[stage].activation_bytes);
    --ranks_[rank].in_flight;
  }

  void run_pieces(int rank, Slot at, int pieces) {
    if (pieces == 0) return;  // ran in a wait, or to make room
    const StageCost& cost = costs_[at.stage];
    int& left = pieces_left_[slot(at.stage, at.micro_batch)];
    const double share = static_cast<double>(pieces) / cost.p2_units;
    compute(rank, Op::kBackwardP2, at, cost.backward_p2 * share);
    hold(rank, -cost.stash_bytes * share);
    left -= pieces;
    if (left == 0) --ranks_[rank].in_flight;
  }

  bool has_pending(int rank) {
    RankState& state = ranks_[rank];
    while (state.head < state.pending.size() &&
           pieces_left_[slot(state.pending[state.head].stage, state.pending[state.head].micro_batch)] == 0) {
      ++state.head;
    }
    return state.head < state.pending.size();
  }

  void run_oldest_piece(int rank) { run_pieces(rank, ranks_[rank].pending[ranks_[rank].head], 1); }

  void make_room(int rank, double need) {
    const RankState& state = ranks_[rank];
    if (state.cap <= 0 || need <= 0) return;
    while (exceeds(state.bytes + need, state.cap) && has_pending(rank)) run_oldest_piece(rank);
  }

  void wait_until(int rank, double arrival) {
    RankState& state = ranks_[rank];
    if (schedule_.fills()) {
      while (exceeds(arrival, state.now) && has_pending(rank)) run_oldest_piece(rank);
    }
    if (arrival <= state.now) return;
    const IdleCause cause = !state.started      ? IdleCause::kStartUp
                            : has_pending(rank) ? IdleCause::kMessage
                                                : IdleCause::kNothing;
    idle(rank, cause) += arrival - state.now;
    state.now = arrival;
  }

  void compute(int rank, Op op, Slot at, double seconds) {
    RankState& state = ranks_[rank];
    RankSimulation& result = result_.ranks[rank];
    const double begin = state.now;
    state.now += seconds;
    result.busy += seconds;
    auto& timeline = result.timeline;
    if (op == Op::kBackwardP2 && !timeline.empty()) {
      SimulatedOp& last = timeline.back();
      if (last.op == op && last.stage == at.stage && last.micro_batch == at.micro_batch &&
          last.end == begin) {
        last.end = state.now;
        return;
      }
    }
    timeline.push_back({op, at.stage, at.micro_batch, begin, state.now});
  }

  void hold(int rank, double bytes) {
    ranks_[rank].bytes += bytes;
    result_.ranks[rank].peak_bytes = std::max(result_.ranks[rank].peak_bytes, ranks_[rank].bytes);
  }

  void run_optimizer() {
    if (!has_backward_) return;
    for (int stage = 0; stage < schedule_.stages; ++stage) {
      const int rank = schedule_.rank_of_stage[stage];
      ranks_[rank].now += costs_[stage].optimizer;
      result_.ranks[rank].busy += costs_[stage].optimizer;
    }
  }

  const Schedule& schedule_;
  const std::vector<StageCost>& costs_;
  const SimulationOptions& options_;
  bool has_backward_ = false;
  std::vector<double> forward_arrival_;   // per (receiving stage, micro-batch)
  std::vector<double> backward_arrival_;  // likewise
  std::vector<int> pieces_left_;          // of W, per (stage, micro-batch), once its I has run
  std::vector<RankState> ranks_;
  Simulation result_;
};

}  // namespace

std::string_view idle_cause_name(IdleCause cause) {
  constexpr std::array<std::string_view, kIdleCauses> kNames = {"start-up", "message", "nothing to fill",
                                                                "tail"};
  return kNames.at(static_cast<size_t>(cause));
}

double Simulation::idle_fraction(int rank) const {
  return step_seconds > 0 ? (step_seconds - ranks.at(rank).busy) / step_seconds : 0;
}

double Simulation::bubble_ratio() const {
  double sum = 0;
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) sum += idle_fraction(rank);
  return ranks.empty() ? 0 : sum / static_cast<double>(ranks.size());
}

Simulation simulate(const Schedule& schedule, const std::vector<StageCost>& costs,
                    const SimulationOptions& options) {
  validate(schedule);
  check_inputs(schedule, costs, options);
  return Simulator(schedule, costs, options).run();
}

}  // namespace twobp
