// A rank's clock moves only with its own ops and with the messages it waits for. W that a rank runs in a wait
// affects others only by the time when the rank goes on. So no event queue is needed: ranks run one after the
// other, each until it needs a message that is not sent yet (walk.h), and a wait is filled once the arrival
// time is known. Ranks advance in the order of time only if they interact in other ways than through
// messages: on a shared link, or in each other's memory.
#include "twobp/schedule/simulate/simulator.h"

#include <algorithm>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/schedule/check/leading_forwards.h"
#include "twobp/schedule/check/walk.h"
#include "twobp/schedule/simulate/bubble.h"
#include "twobp/schedule/simulate/gradient_sums.h"
#include "twobp/schedule/simulate/links.h"
#include "twobp/schedule/simulate/memory_book.h"
#include "twobp/schedule/simulate/rank_state.h"
#include "twobp/schedule/simulate/recorded.h"
#include "twobp/schedule/simulate/stage_model.h"

namespace twobp {
namespace {

class Simulator {
 public:
  Simulator(const Schedule& schedule, const std::vector<StageCost>& costs, const SimulationOptions& options,
            bool fills)
      : schedule_(schedule),
        costs_(costs),
        options_(options),
        fills_(fills),
        links_(schedule, costs, options),
        sums_(schedule, costs, options.data_parallel),
        recorded_(schedule, options.recorded),
        memory_(schedule.stages, schedule.rank_of_stage, schedule.rank_count()) {
    const size_t slots = slot(schedule.stages, 0);
    forward_ = backward_ = std::vector<Message>(slots);
    pieces_left_.assign(slots, kNoP1Yet);
    if (!recorded_.empty()) pieces_recorded_.assign(slots, 0);
    slots_done_.assign(schedule.stages, 0);
    slots_p1_done_.assign(schedule.stages, 0);
    gradients_done_.assign(schedule.stages, 0);
    result_.ranks.resize(schedule.ranks.size());
    by_bucket_ = options.p2_order == P2Order::kBucket && recorded_.empty();
    for (int rank = 0; rank < schedule.rank_count(); ++rank) {
      ranks_.push_back(rank_at_begin(schedule.ranks[rank], by_bucket_));
      has_backward_ |= ranks_[rank].trains;
      if (options.timeline) result_.ranks[rank].timeline.reserve(compute_ops(schedule.ranks[rank]));
      if (!options.cap_per_rank.empty()) ranks_[rank].cap = options.cap_per_rank[rank];
      if (!options.begin.empty()) ranks_[rank].now = options.begin[rank];
    }
    models_ = stage_models(schedule, costs, has_backward_);
    if (options.norm_known > 0) leading_ = leading_forwards(schedule).end;
    visited_.assign(schedule.ranks.size(), 0);
  }

  Simulation run() {
    const auto visit = [&](int rank, const Instruction& at, int m) { step(rank, at.op, at.stage, m); };
    if (options_.shared_links.empty() && options_.message_holder == MessageHolder::kNobody) {
      walk(schedule_, visit);
    } else {
      const auto clock = [&](int rank, const Instruction& next, int m) {
        const double now = may_go_on(rank);
        return is_receive(next.op) ? std::max(now, message(next.op, next.stage, m).arrived) : now;
      };
      const auto fill = [&](int rank, const Instruction& next, int m) {
        if (!is_receive(next.op) || may_go_on(rank) > ranks_[rank].now) return false;  // step() waits first
        memory_.settle(rank, ranks_[rank].now);
        return fill_wait_for(rank, message(next.op, next.stage, m));
      };
      walk_in_time(schedule_, visit, clock, fill);
    }
    for (int rank = 0; rank < schedule_.rank_count(); ++rank) run_recorded_w(rank);
    if (has_backward_) sums_.wait(gradients_done_, ranks_, result_.ranks);
    run_optimizer();
    finish();
    return std::move(result_);
  }

 private:
  static constexpr int kNoP1Yet = -1;

  size_t slot(int stage, int m) const { return static_cast<size_t>(stage) * schedule_.micro_batches + m; }
  // Messages are indexed by their receive.
  Message& message(Op receive, int stage, int m) {
    return (receive == Op::kRecvForward ? forward_ : backward_)[slot(stage, m)];
  }
  bool same_rank(int a, int b) const { return schedule_.rank_of_stage[a] == schedule_.rank_of_stage[b]; }

  // The earliest time when the rank may run this op, apart from the op's own waits.
  double may_go_on(int rank) const {
    const bool leads = leading_.empty() || visited_[rank] < leading_[rank];
    return leads ? ranks_[rank].now : std::max(ranks_[rank].now, options_.norm_known);
  }

  void step(int rank, Op op, int stage, int m) {
    RankState& state = ranks_[rank];
    if (const double from = may_go_on(rank); from > state.now) {
      book_wait(result_.ranks[rank], {state.now, from, from, state.started, false, state.splits_p2});
      state.now = from;
    }
    ++visited_[rank];
    if (ranks_[rank].before_tail == 0) run_by_layer(rank, 0, p2_units(0));
    --ranks_[rank].before_tail;
    if (is_compute(op) && op != Op::kBackwardP2) run_recorded_w(rank);
    memory_.settle(rank, ranks_[rank].now);
    switch (op) {
      case Op::kForward:
        return forward(rank, stage, m);
      case Op::kBackwardP1:
        return backward_p1(rank, stage, m);
      case Op::kBackward:
        return backward(rank, stage, m);
      case Op::kBackwardP2:
        return run_pieces(rank, {stage, m}, pieces_left_[slot(stage, m)]);
      default: {
        const int peer = stage + (op == Op::kSendForward || op == Op::kRecvBackward ? 1 : -1);
        return is_receive(op) ? receive(rank, op, stage, m, peer) : send(rank, op, stage, m, peer);
      }
    }
  }

  const StageModel& model(int stage, int m) const { return models_[cost_index(schedule_, costs_, stage, m)]; }
  // The same for all micro-batches.
  int p2_units(int stage) const { return models_[stage].p2_units(); }
  double message_bytes(Op send, int stage, int m) const {
    return send == Op::kSendForward ? model(stage, m).output : model(stage, m).input_gradient;
  }

  void send(int rank, Op op, int stage, int m, int to) {
    const bool forward = op == Op::kSendForward;
    const double now = ranks_[rank].now;
    const double bytes = message_bytes(op, stage, m);
    const size_t cost = cost_index(schedule_, costs_, stage, m);
    message(forward ? Op::kRecvForward : Op::kRecvBackward, to, m) = {
        now, forward ? links_.send_forward(cost, now) : links_.send_backward(cost, now)};
    if (options_.message_holder == MessageHolder::kSender) return;
    memory_.add(stage, -bytes, now, op, m);
    if (options_.message_holder == MessageHolder::kReceiver) memory_.add_later(to, bytes, now, op, m);
  }

  void receive(int rank, Op op, int stage, int m, int from) {
    if (recorded_.has_receives(rank)) run_recorded_w(rank);
    wait_for(rank, message(op, stage, m));
    recorded_.take_receive(rank, op, stage, m);
    memory_.settle(rank, ranks_[rank].now);
    if (options_.message_holder == MessageHolder::kReceiver) return;
    const double bytes = message_bytes(sender_op(op), from, m);
    if (bytes > 0) make_room(rank, bytes + model(stage, m).largest_p2);
    const double now = ranks_[rank].now;
    memory_.add(stage, bytes, now, op, m);
    if (options_.message_holder == MessageHolder::kSender) memory_.add_later(from, -bytes, now, op, m);
  }

  void forward(int rank, int stage, int m) {
    recorded_.take(rank, Op::kForward, stage, m);
    RankState& state = ranks_[rank];
    state.started = true;
    run_steps(rank, Op::kForward, {stage, m}, model(stage, m).forward);
    ++state.in_flight;
    result_.ranks[rank].peak_in_flight = std::max(result_.ranks[rank].peak_in_flight, state.in_flight);
    if (!has_backward_) --state.in_flight;  // an evaluation keeps nothing
    if (!schedule_.is_last(stage) && same_rank(stage, stage + 1)) {
      memory_.hand_over(stage, stage + 1, model(stage, m).output, state.now, Op::kForward, m);
    }
  }

  void backward_p1(int rank, int stage, int m) {
    recorded_.take(rank, Op::kBackwardP1, stage, m);
    RankState& state = ranks_[rank];
    const int units = p2_units(stage);
    pieces_left_[slot(stage, m)] = state.not_yet = units;
    if (units > 0) state.pending.push_back({stage, m});
    if (state.before_tail == 0 && schedule_.is_first(stage)) {
      run_last_p1(rank, {stage, m});
    } else {
      sums_.p1_ran(stage, model(stage, m), state.now);
      run_steps(rank, Op::kBackwardP1, {stage, m}, model(stage, m).backward_p1);
    }
    state.not_yet = 0;
    ++slots_p1_done_[stage];
    hand_back(rank, stage, m);
    if (units == 0) micro_batch_done(rank, stage);
  }

  // Layer by layer, so that the whole stash never exists at once.
  void backward(int rank, int stage, int m) {
    recorded_.take(rank, Op::kBackwardP1, stage, m);
    const StageModel& model = this->model(stage, m);
    RankState& state = ranks_[rank];
    make_room(rank, model.backward.whole.need);
    state.part = 0;
    const double begin = state.now;
    compute(rank, Op::kBackwardP1, {stage, m}, model.backward_p1.whole.seconds, 0);
    compute(rank, Op::kBackwardP2, {stage, m}, model.p2_seconds, model.p2_units());
    sums_.backward_ran(stage, model, begin);
    grow(rank, stage, model.backward.whole, begin, Op::kBackward, m);
    hand_back(rank, stage, m);
    pieces_left_[slot(stage, m)] = 0;
    ++slots_p1_done_[stage];
    micro_batch_done(rank, stage);
  }

  void hand_back(int rank, int stage, int m) {
    if (schedule_.is_first(stage) || !same_rank(stage, stage - 1)) return;
    memory_.hand_over(stage, stage - 1, model(stage, m).input_gradient, ranks_[rank].now, Op::kBackwardP1, m);
  }

  // Runs all layers at once if there is room for each, else one by one, with W in between.
  void run_steps(int rank, Op op, Slot at, const OpModel& model) {
    RankState& state = ranks_[rank];
    state.part = 0;
    const auto run = [&](const Growth& step) {
      const double begin = state.now;
      compute(rank, op, at, step.seconds, 0);
      grow(rank, at.stage, step, begin, op, at.micro_batch);
    };
    const bool fits = state.cap <= 0 || !exceeds(memory_.bytes(rank) + model.whole.need, state.cap);
    if (fits || (state.not_yet == 0 && !has_pending(rank))) return run(model.whole);
    for (const Growth& step : model.steps) {
      make_room(rank, step.need);
      run(step);
      state.not_yet -= step.p2_units;
    }
  }

  void run_pieces(int rank, Slot at, int pieces) {
    if (pieces == 0) return;  // they ran in a wait, or to make room
    const StageModel& model = this->model(at.stage, at.micro_batch);
    int& left = pieces_left_[slot(at.stage, at.micro_batch)];
    const int first = model.p2_units() - left;
    const P2Piece& before = model.pieces[first];
    const P2Piece& after = model.pieces[first + pieces];
    Growth growth{after.begin - before.begin, 0, before.freed - after.freed};
    if (model.p2_peaks) {
      for (int i = first; i < first + pieces; ++i) {
        growth.peak = std::max(growth.peak, before.freed - model.pieces[i].freed + model.pieces[i].peak);
      }
    }
    const double begin = ranks_[rank].now;
    compute(rank, Op::kBackwardP2, at, growth.seconds, pieces);
    sums_.pieces_ran(at.stage, model, first, pieces, begin);
    grow(rank, at.stage, growth, begin, Op::kBackwardP2, at.micro_batch);
    left -= pieces;
    if (left == 0) micro_batch_done(rank, at.stage);
  }

  void micro_batch_done(int rank, int stage) {
    --ranks_[rank].in_flight;
    if (++slots_done_[stage] == schedule_.micro_batches) gradients_done_[stage] = ranks_[rank].now;
  }

  bool has_pending(int rank) {
    RankState& state = ranks_[rank];
    for (; state.head < state.pending.size(); ++state.head) {
      const Slot& oldest = state.pending[state.head];
      const int left = pieces_left_[slot(oldest.stage, oldest.micro_batch)];
      if (left > 0) return state.head + 1 < state.pending.size() || left > state.not_yet;
    }
    return false;
  }

  // Runs the remaining W of the rank's stages after `first`, and of stage `first` the first `pieces` of each
  // micro-batch. The last layer goes first, with all its micro-batches.
  void run_by_layer(int rank, int first, int pieces) {
    for (int stage = schedule_.stages - 1; stage >= first; --stage) {
      if (schedule_.rank_of_stage[stage] != rank) continue;
      const int units = p2_units(stage);
      for (int piece = 0; piece < (stage == first ? pieces : units); ++piece) {
        for (int place = 0; place < schedule_.micro_batches; ++place) {
          const int m = schedule_.backward_order(place);
          // Never so before its I: kNoP1Yet pieces are left.
          if (units - pieces_left_[slot(stage, m)] == piece) run_pieces(rank, {stage, m}, 1);
        }
      }
    }
  }

  // Runs an I that nobody waits for, with each layer's W right after it.
  void run_last_p1(int rank, Slot at) {
    RankState& state = ranks_[rank];
    const StageModel& model = this->model(at.stage, at.micro_batch);
    state.part = 0;
    run_by_layer(rank, at.stage, 0);
    for (size_t i = 0; i < model.backward_p1.steps.size(); ++i) {
      const Growth& step = model.backward_p1.steps[i];
      make_room(rank, step.need);
      const double begin = state.now;
      compute(rank, Op::kBackwardP1, at, step.seconds, 0);
      grow(rank, at.stage, step, begin, Op::kBackwardP1, at.micro_batch);
      sums_.layer_ran(at.stage, i, state.now);
      state.not_yet -= step.p2_units;
      run_by_layer(rank, at.stage, model.p2_units() - state.not_yet);
    }
  }

  void run_oldest_piece(int rank) { run_pieces(rank, ranks_[rank].pending[ranks_[rank].head], 1); }

  bool lacks_room(int rank, double need) const {
    const double cap = ranks_[rank].cap;
    return cap > 0 && need > 0 && exceeds(memory_.bytes(rank) + need, cap);
  }

  void make_room(int rank, double need) {
    while (lacks_room(rank, need) && has_pending(rank)) run_oldest_piece(rank);
  }

  // Runs the W that a recorded run has before its next F or I, unless it is done already.
  void run_recorded_w(int rank) {
    while (run_recorded_piece(rank)) continue;
  }

  bool run_recorded_piece(int rank) {
    while (const RecordedOp* op = recorded_.next_w(rank)) {
      const size_t at = slot(op->stage, op->micro_batch);
      const int left = pieces_left_[at];
      TWOBP_CHECK(left != kNoP1Yet, "the recorded order of rank ", rank, " has ",
                  to_string({Op::kBackwardP2, op->stage, op->micro_batch}), " before its I");
      const int units = p2_units(op->stage);
      const int recorded = op->pieces == 0 ? units : std::min(units, pieces_recorded_[at] + op->pieces);
      if (units - left < recorded && left > 0) {
        run_pieces(rank, {op->stage, op->micro_batch}, 1);
        return true;
      }
      pieces_recorded_[at] = recorded;
      recorded_.take_w(rank);
    }
    return false;
  }

  bool fill_wait(int rank) {
    if (!recorded_.empty()) return run_recorded_piece(rank);
    if (!has_pending(rank)) return false;
    if (!by_bucket_ || !run_piece_of_ended_stage(rank)) run_oldest_piece(rank);
    return true;
  }

  // With replicas: runs W of a stage that has no more I, also layer by layer.
  bool run_piece_of_ended_stage(int rank) {
    for (int stage = schedule_.stages - 1; stage >= 0 && options_.data_parallel.replicas > 1; --stage) {
      if (schedule_.rank_of_stage[stage] != rank || slots_p1_done_[stage] < schedule_.micro_batches) continue;
      int most = schedule_.backward_order(0);  // the first in order with the most pieces left
      for (int place = 1; place < schedule_.micro_batches; ++place) {
        const int m = schedule_.backward_order(place);
        if (pieces_left_[slot(stage, m)] > pieces_left_[slot(stage, most)]) most = m;
      }
      if (pieces_left_[slot(stage, most)] == 0) continue;
      run_pieces(rank, {stage, most}, 1);
      return true;
    }
    return false;
  }

  // Runs W until the message is there. Returns whether it ran any.
  bool fill_wait_for(int rank, const Message& message) {
    const double begin = ranks_[rank].now;
    while (fills_ && exceeds(message.arrived, ranks_[rank].now) && fill_wait(rank))
      memory_.settle(rank, ranks_[rank].now);
    return ranks_[rank].now > begin;
  }

  void wait_for(int rank, const Message& message) {
    RankState& state = ranks_[rank];
    fill_wait_for(rank, message);
    if (message.arrived <= state.now) return;
    book_wait(result_.ranks[rank],
              {state.now, message.arrived, message.sent, state.started, has_pending(rank), state.splits_p2});
    state.now = message.arrived;
  }

  void compute(int rank, Op op, Slot at, double seconds, int pieces) {
    RankState& state = ranks_[rank];
    RankSimulation& result = result_.ranks[rank];
    const double begin = state.now;
    state.now += seconds;
    result.busy += seconds;
    const SimulatedOp ran{op, at.stage, at.micro_batch, begin, state.now, 0, pieces, memory_.bytes(rank)};
    if (!options_.timeline || prolong_last(result.timeline, ran)) return;
    result.timeline.push_back(ran);
    if (op != Op::kBackwardP2) result.timeline.back().part = state.part++;
  }

  // The bytes of the op that ran last.
  void grow(int rank, int stage, const Growth& by, double begin, Op op, int micro_batch) {
    memory_.grow(stage, by, begin, ranks_[rank].now, op, micro_batch);
    if (options_.timeline) result_.ranks[rank].timeline.back().held_bytes = memory_.bytes(rank);
  }

  void run_optimizer() {
    if (!has_backward_) return;
    for (int stage = 0; stage < schedule_.stages; ++stage) {
      const int rank = schedule_.rank_of_stage[stage];
      ranks_[rank].now += costs_[stage].optimizer;
      result_.ranks[rank].busy += costs_[stage].optimizer;
    }
  }

  void finish() {
    std::vector<double> ends;
    for (const RankState& state : ranks_) ends.push_back(state.now);
    book_tails(result_, ends);
    for (size_t rank = 0; rank < ends.size(); ++rank) result_.ranks[rank].end = ends[rank];
    for (int rank = 0; rank < schedule_.rank_count(); ++rank) {
      RankSimulation& result = result_.ranks[rank];
      memory_.settle(rank, result_.step_seconds);
      result.peak = memory_.rank_peak(rank);
      result.peak_bytes = result.peak.bytes;
    }
    for (int stage = 0; stage < schedule_.stages; ++stage) {
      RankSimulation& rank = result_.ranks[schedule_.rank_of_stage[stage]];
      rank.fixed_bytes += costs_[stage].fixed_bytes;
      if (has_backward_) rank.update_bytes = std::max(rank.update_bytes, costs_[stage].update_bytes);
      result_.stage_peaks.push_back(memory_.stage_peak(stage));
    }
    book_imbalance(result_);
  }

  const Schedule& schedule_;
  const std::vector<StageCost>& costs_;
  const SimulationOptions& options_;
  const bool fills_;
  Links links_;
  GradientSums sums_;
  RecordedOrder recorded_;
  MemoryBook memory_;
  std::vector<StageModel> models_;
  bool has_backward_ = false;
  bool by_bucket_ = false;
  std::vector<Message> forward_;   // per (receiving stage, micro-batch)
  std::vector<Message> backward_;  // likewise
  std::vector<int> pieces_left_;   // of W, by (stage, micro-batch)
  std::vector<int> pieces_recorded_;
  std::vector<int> slots_p1_done_, slots_done_;  // by stage: micro-batches with I done, with W done
  std::vector<double> gradients_done_;           // by stage: when the last of them was done
  std::vector<size_t> leading_;                  // see leading_forwards; empty: no norm to wait for
  std::vector<size_t> visited_;                  // by rank: micro-batches of instructions so far
  std::vector<RankState> ranks_;
  Simulation result_;
};

}  // namespace

Simulation run_simulation(const Schedule& schedule, const std::vector<StageCost>& costs,
                          const SimulationOptions& options, bool fills) {
  return Simulator(schedule, costs, options, fills).run();
}

}  // namespace twobp
