// A rank's clock moves only with its own ops and with the messages it waits for. W that a rank runs in a wait affects
// others only by the time when the rank goes on. So no event queue is needed: ranks run one after the other, each until
// it needs a message that is not sent yet (walk.h), and a wait is filled once the arrival time is known. Ranks advance
// in the order of time only if they interact in other ways than through messages: on a shared link, or in each other's
// memory.
#include "twobp/schedule/simulate/simulator.h"

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/schedule/check/walk.h"
#include "twobp/schedule/simulate/links.h"
#include "twobp/schedule/simulate/stage_model.h"
#include "twobp/schedule/w_queue.h"

namespace twobp {
namespace {

class Simulator {
 public:
  Simulator(const Schedule& schedule, const std::vector<StageCost>& costs, const SimulationOptions& options, bool fills)
      : schedule_(schedule),
        costs_(costs),
        options_(options),
        fills_(fills),
        turns_(takes_turns(schedule, fills)),
        links_(schedule, costs, options),
        sums_(schedule, costs, options.data_parallel),
        recorded_(schedule, options.recorded),
        memory_(schedule.stages, schedule.rank_of_stage, schedule.rank_count()) {
    const size_t slots = slot(schedule.stages, 0);
    forward_ = backward_ = std::vector<Message>(slots);
    if (!recorded_.empty()) pieces_recorded_.assign(slots, 0);
    slots_done_.assign(schedule.stages, 0);
    gradients_done_.assign(schedule.stages, 0);
    result_.ranks.resize(schedule.ranks.size());
    if (recorded_.empty()) streams_ = options.streams;
    const P2Order order = !streams_.empty()   ? P2Order::kBucket
                          : recorded_.empty() ? options.p2_order
                                              : P2Order::kOldest;
    std::vector<bool> gives_gradient(schedule.stages);
    for (int stage = 0; stage < schedule.stages; ++stage) gives_gradient[stage] = schedule.gives_gradient(stage);
    for (int rank = 0; rank < schedule.rank_count(); ++rank) {
      ranks_.push_back(rank_at_begin(schedule.ranks[rank], order, gives_gradient));
      queues_.emplace_back(schedule, rank, WQueue::Rules{order, options.data_parallel.replicas > 1, nullptr, streams_});
      has_backward_ |= ranks_[rank].trains;
      if (options.timeline) result_.ranks[rank].timeline.reserve(compute_ops(schedule.ranks[rank]));
      if (!options.cap_per_rank.empty()) ranks_[rank].cap = options.cap_per_rank[rank];
      if (!options.begin.empty()) ranks_[rank].now = options.begin[rank];
    }
    std::vector<bool> sorted(schedule.stages);
    for (int stage = 0; stage < schedule.stages; ++stage) sorted[stage] = smallest_first(stage);
    models_ = stage_models(schedule, costs, has_backward_, sorted);
    if (options.norm_known > 0) leading_ = leading_forwards(schedule).end;
    visited_.assign(schedule.ranks.size(), 0);
    frozen_left_ = schedule.micro_batches;
    ahead_.assign(schedule.ranks.size(), 0);
    if (options.ahead > 0) of_next_ = std::vector<Message>(slots);
    for (int stage = 0; stage < schedule.frozen && stage < options.ahead; ++stage) {
      const int last = options.ahead - stage - 1;  // whose output has not been sent
      memory_.add(stage, model(stage, last).output, 0, Op::kForward, last);
    }
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
    for (int rank = 0; rank < schedule_.rank_count(); ++rank) {
      run_recorded_w(rank);
      if (!streams_.empty()) run_by_layer(rank, -1, 0);
      while (run_ahead(rank, /*waits=*/false)) continue;
    }
    if (has_backward_) sums_.wait(gradients_done_, ranks_, result_.ranks);
    run_optimizer();
    finish();
    return std::move(result_);
  }

 private:
  // F that runs in the waits of the F or I before it.
  struct Turn {
    Slot at{};
    size_t layer = 0;
    bool within = false;  // the layer has begun
    bool waits = false;   // for tokens, not for room
    bool leads = false;   // the F or I before it has ended
    int exchanges = 0;    // that are over
    double arrives = 0;
    double begin = 0;  // of the layer
    double left = 0;   // seconds of it
    int part = 0;
  };

  size_t slot(int stage, int m) const { return static_cast<size_t>(stage) * schedule_.micro_batches + m; }
  // Messages are indexed by their receive.
  Message& message(Op receive, int stage, int m) {
    return (receive == Op::kRecvForward ? forward_ : backward_)[slot(stage, m)];
  }
  bool streams(int stage) const { return !streams_.empty() && streams_[static_cast<size_t>(stage)]; }
  bool smallest_first(int stage) const { return streams(stage) && options_.data_parallel.replicas == 1; }
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
    if (state.before_tail == 0) run_by_layer(rank, -1, 0);
    --state.before_tail;
    if (turns_) next_.go_on(schedule_.ranks[rank]);
    if (beside_) return end_turn(rank);
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
        return run_if(rank, queues_[rank].take_rest(stage, m));
      default: {
        const int peer = stage + (op == Op::kSendForward || op == Op::kRecvBackward ? 1 : -1);
        if (is_receive(op)) {
          if (op == Op::kRecvBackward || !foreseen(stage, m)) receive(rank, op, stage, m, peer, message(op, stage, m));
        } else if (op == Op::kSendBackward || !foreseen(peer, m)) {
          const Op receive = op == Op::kSendForward ? Op::kRecvForward : Op::kRecvBackward;
          send(rank, op, stage, m, peer, message(receive, peer, m));
        }
        return;
      }
    }
  }

  const StageModel& model(int stage, int m) const { return models_[cost_index(schedule_, costs_, stage, m)]; }
  // The same for all micro-batches.
  int p2_units(int stage) const { return models_[stage].p2_units(); }
  double message_bytes(Op send, int stage, int m) const {
    return send == Op::kSendForward ? model(stage, m).output : model(stage, m).input_gradient;
  }

  void send(int rank, Op op, int stage, int m, int to, Message& message) {
    const double now = ranks_[rank].now;
    const double bytes = message_bytes(op, stage, m);
    const size_t cost = cost_index(schedule_, costs_, stage, m);
    message = {now, op == Op::kSendForward ? links_.send_forward(cost, now) : links_.send_backward(cost, now)};
    if (options_.message_holder == MessageHolder::kSender) return;
    memory_.add(stage, -bytes, now, op, m);
    if (options_.message_holder == MessageHolder::kReceiver) memory_.add_later(to, bytes, now, op, m);
  }

  void receive(int rank, Op op, int stage, int m, int from, const Message& message) {
    if (recorded_.has_receives(rank)) run_recorded_w(rank);
    wait_for(rank, message);
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
    if (stage == 0) --frozen_left_;
    if (foreseen(stage, m)) return;
    ranks_[rank].started = true;
    run_steps(rank, Op::kForward, {stage, m}, model(stage, m).forward);
    end_forward(rank, stage, m);
  }

  void end_forward(int rank, int stage, int m) {
    RankState& state = ranks_[rank];
    ++state.in_flight;
    result_.ranks[rank].peak_in_flight = std::max(result_.ranks[rank].peak_in_flight, state.in_flight);
    if (!has_backward_ || stage < schedule_.frozen) --state.in_flight;  // nothing is kept
    if (!schedule_.is_last(stage) && same_rank(stage, stage + 1)) {
      memory_.hand_over(stage, stage + 1, model(stage, m).output, state.now, Op::kForward, m);
    }
  }

  void backward_p1(int rank, int stage, int m) {
    recorded_.take(rank, Op::kBackwardP1, stage, m);
    RankState& state = ranks_[rank];
    queues_[rank].begin_p1(stage, m);
    if (state.before_tail == 0 && state.ends_by_layer && !smallest_first(stage)) {
      run_last_p1(rank, {stage, m});
    } else {
      sums_.p1_ran(stage, model(stage, m), state.now);
      run_steps(rank, Op::kBackwardP1, {stage, m}, model(stage, m).backward_p1);
    }
    queues_[rank].end_p1();
    hand_back(rank, stage, m);
    if (p2_units(stage) == 0) micro_batch_done(rank, stage);
  }

  // Layer by layer, so that the whole stash never exists at once.
  void backward(int rank, int stage, int m) {
    recorded_.take(rank, Op::kBackwardP1, stage, m);
    const StageModel& model = this->model(stage, m);
    RankState& state = ranks_[rank];
    make_room(rank, model.backward.whole.need);
    state.part = 0;
    const double begin = state.now;
    if (model.backward_p1.exchanges) {
      for (size_t i = 0; i < model.backward.steps.size(); ++i) {
        const Growth& p1 = model.backward_p1.steps[i];
        compute_step(rank, Op::kBackwardP1, {stage, m}, p1);
        come_back(rank, p1);
        if (p1.p2_units == 0) continue;
        compute(rank, Op::kBackwardP2, {stage, m}, model.backward.steps[i].seconds - p1.seconds, p1.p2_units);
      }
    } else {
      compute(rank, Op::kBackwardP1, {stage, m}, model.backward_p1.whole.seconds, 0);
      compute(rank, Op::kBackwardP2, {stage, m}, model.p2_seconds, model.p2_units());
    }
    const bool waits = model.backward_p1.exchanges;  // as if all before its work
    sums_.backward_ran(stage, model, waits ? state.now - model.backward.whole.seconds : begin);
    grow(rank, stage, model.backward.whole, begin, Op::kBackward, m);
    hand_back(rank, stage, m);
    queues_[rank].begin_p1(stage, m);
    queues_[rank].end_p1();
    micro_batch_done(rank, stage);
  }

  void hand_back(int rank, int stage, int m) {
    if (!schedule_.gives_gradient(stage) || !same_rank(stage, stage - 1)) return;
    memory_.hand_over(stage, stage - 1, model(stage, m).input_gradient, ranks_[rank].now, Op::kBackwardP1, m);
  }

  // Runs all layers at once if there is room for each, else one by one, with W in between.
  void run_steps(int rank, Op op, Slot at, const OpModel& model) {
    RankState& state = ranks_[rank];
    state.part = 0;
    WQueue& queue = queues_[rank];
    const int units = op == Op::kBackwardP1 ? p2_units(at.stage) : 0;
    const bool fits = state.cap <= 0 || !exceeds(memory_.bytes(rank) + model.whole.need, state.cap);
    if (!model.exchanges && (fits || (units == 0 && queue.empty()))) {
      run_step(rank, op, at, model.whole);
      if (units > 0) queue.add(units);
      return;
    }
    lead_ = {op, at};
    for (const Growth& step : model.steps) {
      lead_.left = {&step, &model.steps.back() + 1};
      make_room(rank, step.need);
      run_step(rank, op, at, step);
      if (step.p2_units > 0) queue.add(step.p2_units);
    }
  }

  // The next F takes a turn while the F or I that leads waits for tokens; see StepLoop::Turns. Returns whether it did.
  bool take_turn(int rank) {
    if (!beside_) return turns_ && begin_turn(rank);
    Turn& turn = *beside_;
    const auto& steps = model(turn.at.stage, turn.at.micro_batch).forward.steps;
    if (turn.leads || turn.layer == steps.size() || exceeds(turn.arrives, ranks_[rank].now)) return false;
    if (turn.waits ? !awaits_tokens() : lacks_room(rank, steps[turn.layer].need + room_of_lead())) return false;
    go_on(rank, turn);
    return true;
  }

  // Whether F beside the first waits for tokens, and may go on when they are there.
  bool awaits_tokens() const {
    const bool overtakes = lead_.op == Op::kForward && lead_.exchanges <= beside_->exchanges;
    return beside_->waits && !beside_->leads && !overtakes;
  }

  bool begin_turn(int rank) {
    const auto& list = schedule_.ranks[rank];
    if (next_.done(list) || !may_turn(list[next_.index - 1], list[next_.index])) return false;
    const Slot at{list[next_.index].stage, list[next_.index].micro_batch};
    const Growth& step = model(at.stage, at.micro_batch).forward.steps.front();
    if (recorded_.next_w(rank) != nullptr || lacks_room(rank, step.need + room_of_lead())) return false;
    recorded_.take(rank, Op::kForward, at.stage, at.micro_batch);
    go_on(rank, beside_.emplace(Turn{.at = at}));
    return true;
  }

  // What the F or I that leads still needs.
  double room_of_lead() const {
    double held = 0;
    double need = 0;
    for (const Growth& step : lead_.left) {
      need = std::max(need, held + step.need);
      held += step.held;
    }
    return need;
  }

  // Runs F until it waits for tokens, or finds no room for its next layer.
  void go_on(int rank, Turn& turn) {
    const auto& steps = model(turn.at.stage, turn.at.micro_batch).forward.steps;
    if (std::exchange(turn.waits, false)) ++turn.exchanges;
    std::swap(ranks_[rank].part, turn.part);
    while (!turn.waits && turn.layer < steps.size()) {
      const Growth& step = steps[turn.layer];
      if (turn.within) {
        compute(rank, Op::kForward, turn.at, turn.left, 0);
        grow(rank, turn.at.stage, step, turn.begin, Op::kForward, turn.at.micro_batch);
        ++turn.layer;
        turn.within = false;
        turn.waits = step.from_experts > 0;
        if (turn.waits) turn.arrives = arrival(rank, step.from_experts);
        continue;
      }
      if (turn.leads) make_room(rank, step.need);
      if (!turn.leads && lacks_room(rank, step.need + room_of_lead())) break;
      turn.begin = ranks_[rank].now;
      turn.left = step.seconds;
      turn.within = true;
      turn.waits = step.to_experts > 0;
      if (!turn.waits) continue;
      turn.arrives = arrival(rank, step.to_experts);
      const double beside = std::min(step.beside_experts, step.seconds);
      if (beside > 0) compute(rank, Op::kForward, turn.at, beside, 0);
      turn.left -= beside;
    }
    std::swap(ranks_[rank].part, turn.part);
  }

  // The list has come to the F that has begun in a wait.
  void end_turn(int rank) {
    Turn& turn = *beside_;
    turn.leads = true;
    const auto [stage, m] = turn.at;
    const size_t layers = model(stage, m).forward.steps.size();
    for (wait_for_tokens(rank, turn.arrives); turn.layer < layers; wait_for_tokens(rank, turn.arrives))
      go_on(rank, turn);
    beside_.reset();
    end_forward(rank, stage, m);
  }

  // F or I of a layer, or of all layers if none exchanges tokens.
  void run_step(int rank, Op op, Slot at, const Growth& step) {
    const double begin = ranks_[rank].now;
    compute_step(rank, op, at, step);
    grow(rank, at.stage, step, begin, op, at.micro_batch);
    come_back(rank, step);
  }

  // Until results leave for the replicas of their tokens.
  void compute_step(int rank, Op op, Slot at, const Growth& step) {
    double left = step.seconds;
    if (step.to_experts > 0) {
      const double arrive = arrival(rank, step.to_experts);
      const double beside = std::min(step.beside_experts, left);
      if (beside > 0) compute(rank, op, at, beside, 0);
      left -= beside;
      wait_for_tokens(rank, arrive);
    }
    compute(rank, op, at, left, 0);
  }

  void come_back(int rank, const Growth& step) {
    if (step.from_experts > 0) wait_for_tokens(rank, arrival(rank, step.from_experts));
  }

  // Of tokens or results that all replicas send to each other now.
  double arrival(int rank, double bytes) {
    const DataParallel& link = options_.data_parallel;
    const double seconds = link.exchange_bytes_per_second > 0 ? bytes / link.exchange_bytes_per_second : 0;
    result_.ranks[rank].exchanges += link.exchange_latency + seconds;
    double& free = ranks_[rank].link_is_free;
    free = std::max(free, ranks_[rank].now) + seconds;
    return free + link.exchange_latency;
  }

  void wait_for_tokens(int rank, double arrive) {
    RankState& state = ranks_[rank];
    while (arrive > state.now) {
      const bool tries = exceeds(arrive, state.now);
      if (tries && (take_turn(rank) || (fills_ && fill_wait(rank)))) {
        memory_.settle(rank, state.now);
        continue;
      }
      const bool turns =
          tries && beside_ && awaits_tokens() && exceeds(beside_->arrives, state.now) && beside_->arrives <= arrive;
      const double until = turns ? beside_->arrives : arrive;
      result_.ranks[rank].idle[static_cast<int>(IdleCause::kExperts)] += until - state.now;
      result_.ranks[rank].bubble[static_cast<int>(BubbleCause::kCommunication)] += until - state.now;
      state.now = until;
      if (turns) take_turn(rank);
    }
    ++lead_.exchanges;
  }

  void run_if(int rank, const std::optional<WUnits>& units) {
    if (units) run_units(rank, *units);
  }

  void run_units(int rank, const WUnits& units) {
    const auto [stage, m, first, count] = units;
    const StageModel& model = this->model(stage, m);
    const P2Piece& before = model.pieces[first];
    const P2Piece& after = model.pieces[first + count];
    Growth growth{after.begin - before.begin, 0, before.freed - after.freed};
    if (model.p2_peaks || streams(stage)) {
      for (int i = first; i < first + count; ++i) {
        const P2Piece& piece = model.pieces[i];
        growth.peak =
            std::max(growth.peak, before.freed - piece.freed + piece.peak + (streams(stage) ? piece.gradient : 0));
      }
    }
    const double begin = ranks_[rank].now;
    compute(rank, Op::kBackwardP2, {stage, m}, growth.seconds, count);
    sums_.pieces_ran(stage, model, first, count, begin);
    grow(rank, stage, growth, begin, Op::kBackwardP2, m);
    if (first + count == p2_units(stage)) micro_batch_done(rank, stage);
  }

  void micro_batch_done(int rank, int stage) {
    --ranks_[rank].in_flight;
    if (++slots_done_[stage] == schedule_.micro_batches) gradients_done_[stage] = ranks_[rank].now;
  }

  // Runs W layer by layer; see WQueue::take_by_layer.
  void run_by_layer(int rank, int stage, int units) {
    queues_[rank].take_by_layer(stage, units, [&](const WUnits& one) { run_units(rank, one); });
  }

  // Runs an I that nobody waits for, with each layer's W right after it.
  void run_last_p1(int rank, Slot at) {
    RankState& state = ranks_[rank];
    const StageModel& model = this->model(at.stage, at.micro_batch);
    state.part = 0;
    run_by_layer(rank, at.stage, 0);
    int made = 0;
    for (size_t i = 0; i < model.backward_p1.steps.size(); ++i) {
      const Growth& step = model.backward_p1.steps[i];
      make_room(rank, step.need);
      run_step(rank, Op::kBackwardP1, at, step);
      sums_.layer_ran(at.stage, i, state.now);
      queues_[rank].add(step.p2_units);
      run_by_layer(rank, at.stage, made += step.p2_units);
    }
  }

  bool lacks_room(int rank, double need) const {
    return twobp::lacks_room(memory_.bytes(rank), need, ranks_[rank].cap);
  }

  void make_room(int rank, double need) {
    while (lacks_room(rank, need) && !queues_[rank].empty()) run_if(rank, queues_[rank].take_oldest());
  }

  // Runs the W that a recorded run has before its next F or I, unless it is done already.
  void run_recorded_w(int rank) {
    while (run_recorded_piece(rank)) continue;
  }

  bool run_recorded_piece(int rank) {
    while (const RecordedOp* op = recorded_.next_w(rank)) {
      const int stage = op->stage;
      const int m = op->micro_batch;
      WQueue& queue = queues_[rank];
      TWOBP_CHECK(queue.has_begun(stage, m), "the recorded order of rank ", rank, " has ",
                  to_string({Op::kBackwardP2, stage, m}), " before its I");
      int& recorded = pieces_recorded_[slot(stage, m)];
      const int units = p2_units(stage);
      const int until = op->pieces == 0 ? units : std::min(units, recorded + op->pieces);
      const bool runs = queue.ran(stage, m) < until;
      if (runs && queue.left(stage, m) > 0) {
        run_if(rank, queue.take_next(stage, m));
        return true;
      }
      if (runs && beside_ && !beside_->leads) return false;  // the I under way has not made it yet
      recorded = until;
      recorded_.take_w(rank);
    }
    return false;
  }

  bool fill_wait(int rank) {
    if (!recorded_.empty()) return run_recorded_piece(rank);
    const std::optional<WUnits> next = queues_[rank].take_filling();
    run_if(rank, next);
    return next.has_value() || run_ahead(rank, /*waits=*/true);
  }

  // Whether the step before has run this F.
  bool foreseen(int stage, int m) const { return stage < schedule_.frozen && m < options_.ahead - stage; }

  // Runs a layer for the next step; see SimulationOptions::ahead.
  bool run_ahead(int rank, bool waits) {
    const int m = ahead_[rank];
    if (!foreseen(rank, m)) return false;  // nor will the next step
    const auto& steps = model(rank, m).forward.steps;
    const Growth& step = steps[ahead_layer_];
    if (waits && (rank > 0 || frozen_left_ > 0 || lacks_room(rank, std::max(step.peak, step.held)))) return false;
    if (ahead_layer_ == 0 && rank > 0) receive(rank, Op::kRecvForward, rank, m, rank - 1, of_next_[slot(rank, m)]);
    RankState& state = ranks_[rank];
    state.started = true;
    state.part = static_cast<int>(ahead_layer_);
    const double begin = state.now;
    compute(rank, Op::kForward, {rank, m}, step.seconds, 0);
    grow(rank, rank, step, begin, Op::kForward, m);
    if (++ahead_layer_ < steps.size()) return true;
    ahead_layer_ = 0;
    ++ahead_[rank];
    if (foreseen(rank + 1, m)) send(rank, Op::kSendForward, rank, m, rank + 1, of_next_[slot(rank + 1, m)]);
    return true;
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
              {state.now, message.arrived, message.sent, state.started, !queues_[rank].empty(), state.splits_p2});
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
      rank.fixed_bytes += costs_[stage].fixed(streams(stage));
      if (streams(stage)) rank.peak_bytes = rank.peak.bytes += streamed_bytes(costs_[stage].layers).in_p1;
      if (has_backward_) rank.update_bytes = std::max(rank.update_bytes, costs_[stage].update_bytes);
      result_.stage_peaks.push_back(memory_.stage_peak(stage));
    }
    book_imbalance(result_);
  }

  const Schedule& schedule_;
  const std::vector<StageCost>& costs_;
  const SimulationOptions& options_;
  const bool fills_;
  const bool turns_;
  Links links_;
  GradientSums sums_;
  RecordedOrder recorded_;
  MemoryBook memory_;
  std::vector<StageModel> models_;
  std::vector<bool> streams_;  // by stage; empty: none
  bool has_backward_ = false;
  std::vector<Message> forward_;        // per (receiving stage, micro-batch)
  std::vector<Message> backward_;       // likewise
  std::vector<WQueue> queues_;          // by rank
  std::vector<int> pieces_recorded_;    // by (stage, micro-batch)
  std::vector<int> slots_done_;         // by stage: micro-batches with W done
  std::vector<double> gradients_done_;  // by stage: when the last of them was done
  std::vector<size_t> leading_;         // see leading_forwards; empty: no norm to wait for
  std::vector<size_t> visited_;         // by rank: micro-batches of instructions so far
  int frozen_left_ = 0;                 // F of the first stage that are to come
  std::vector<int> ahead_;              // by rank: F of the next step that are done,
  size_t ahead_layer_ = 0;              // and layers of the one under way; ranks do not run them at once
  std::vector<Message> of_next_;        // as forward_
  std::vector<RankState> ranks_;
  struct {
    Op op = Op::kForward;
    Slot at{};
    std::span<const Growth> left{};  // layers, from the one under way on
    int exchanges = 0;               // that are over
  } lead_;                           // the last F or I of the list that has begun
  std::optional<Turn> beside_;       // in its waits; of the only rank
  ListCursor next_;                  // of that one's list, after the instruction under way
  Simulation result_;
};

}  // namespace

Simulation run_simulation(const Schedule& schedule, const std::vector<StageCost>& costs,
                          const SimulationOptions& options, bool fills) {
  return Simulator(schedule, costs, options, fills).run();
}

std::string_view bubble_cause_name(BubbleCause cause) {
  constexpr std::array<std::string_view, kBubbleCauses> kNames = {"start-up", "dependency", "communication",
                                                                  "imbalance", "nothing left to fill"};
  return kNames.at(static_cast<size_t>(cause));
}

void book_tails(Simulation& simulation, const std::vector<double>& done) {
  simulation.step_seconds = *std::max_element(done.begin(), done.end());
  for (size_t rank = 0; rank < done.size(); ++rank) {
    const double tail = simulation.step_seconds - done[rank];
    simulation.ranks[rank].idle[static_cast<int>(IdleCause::kTail)] = tail;
    simulation.ranks[rank].bubble[static_cast<int>(BubbleCause::kNothing)] += tail;
  }
}

void book_imbalance(Simulation& simulation) {
  double busiest = 0;
  for (const auto& rank : simulation.ranks) busiest = std::max(busiest, rank.busy);
  for (auto& rank : simulation.ranks) {
    double left = busiest - rank.busy;
    if (left <= 1e-12 * busiest) continue;  // the same work, summed in another order
    for (const BubbleCause from :
         {BubbleCause::kNothing, BubbleCause::kDependency, BubbleCause::kStartUp, BubbleCause::kCommunication}) {
      double& seconds = rank.bubble[static_cast<int>(from)];
      const double taken = std::min(seconds, left);
      seconds -= taken;
      left -= taken;
      rank.bubble[static_cast<int>(BubbleCause::kImbalance)] += taken;
    }
  }
}

}  // namespace twobp
