#include "twobp/pipeline/executor/accounts.h"

#include <utility>

#include "twobp/core/clock.h"
#include "twobp/core/figures.h"
#include "twobp/pipeline/memory/block_cache.h"

namespace twobp {

Accounts::Accounts(int rank, const std::vector<std::unique_ptr<Stage>>& stages, MemoryMeter& meter, Device device)
    : rank_(rank), stages_(stages), meter_(meter), device_(std::move(device)), events_(rank, meter) {}

void Accounts::begin_step(bool want_events, bool timed) {
  times_ = {};
  stage_times_.assign(stages_.size(), {});
  started_ = false;
  timed_ = timed;
  events_.start(want_events);
  products_ = product_time();
  BlockCache::begin_step();
  allocations_ = BlockCache::allocations();
  times_.begin = now_seconds();
  device_times_.start(device_, timed);
}

size_t Accounts::local(int stage) const {
  size_t s = 0;
  while (stages_[s]->index() != stage) ++s;
  return s;
}

void Accounts::idle(IdleCause cause, double begin, double end) {
  times_.idle[static_cast<int>(cause)] += end - begin;
  events_.idle(cause, begin, end);
}

void Accounts::op_begins(twobp::Op op, int stage, int micro_batch, bool w_pending) {
  const bool forward = op == twobp::Op::kForward;
  const double now = now_seconds();
  if (!started_) {
    times_.idle[static_cast<int>(IdleCause::kStartUp)] += now - times_.begin;
    events_.start_up(now);
    started_ = true;
  }
  op_ = {forward ? &StageTimes::forward : &StageTimes::backward_p1, local(stage), now};
  if (forward) ++stage_times_[op_.stage].micro_batches;
  events_.open(forward ? Event::Kind::kForward : Event::Kind::kBackwardP1, stage, micro_batch, now);
  device_times_.open(op_.seconds, static_cast<int>(op_.stage), w_pending ? IdleCause::kMessage : IdleCause::kNothing);
}

void Accounts::op_pauses() {
  const double now = now_seconds();
  stage_times_[op_.stage].*op_.seconds += now - op_.since;
  events_.pause(now);
  device_times_.pause();
}

void Accounts::op_resumes() {
  device_times_.resume();
  op_.since = now_seconds();
  events_.resume(op_.since);
}

void Accounts::op_ends(int units) {
  op_pauses();
  if (op_.seconds == &StageTimes::backward_p1) stage_times_[op_.stage].p2_units = units;
}

void Accounts::w_begins() {
  w_ = now_seconds();
  w_products_ = product_time();
  w_event_ = device_times_.begin_p2();
}

void Accounts::w_ends(const MadeUnit& unit, std::span<const WUnits> together) {
  const size_t s = local(together.front().stage);
  device_times_.end_p2(static_cast<int>(s), w_event_);
  const double now = now_seconds();
  stage_times_[s].backward_p2 += now - w_;
  stage_times_[s].p2_products += product_time() - w_products_;
  if (events_.on()) log_w(unit, together, w_, now);
}

void Accounts::log_w(const MadeUnit& unit, std::span<const WUnits> together, double begin, double end) {
  const double each = (end - begin) / static_cast<double>(together.size());
  // A reordered schedule may concatenate micro-batches that are not successive. Each successive run becomes an event.
  for (size_t i = 0, next = 0; i < together.size(); i = next) {
    const WUnits& first = together[i];
    for (next = i + 1; next < together.size(); ++next) {
      if (together[next].micro_batch != together[next - 1].micro_batch + 1) break;
    }
    Event event;
    event.stage = first.stage;
    event.micro_batch = first.micro_batch;
    event.count = static_cast<int>(next - i);
    event.layer = unit.layer;
    event.unit = unit.leaf;
    event.begin = begin + static_cast<double>(i) * each;
    event.end = next == together.size() ? end : begin + static_cast<double>(next) * each;
    events_.backward_p2(*unit.unit.layer, stages_[local(first.stage)]->layer_name(unit.layer), std::move(event));
  }
}

void Accounts::wait_begins(bool w_pending) {
  wait_ = now_seconds();
  cause_ = w_pending ? IdleCause::kMessage : IdleCause::kNothing;
}

void Accounts::wait_ends() {
  if (started_) idle(cause_, wait_, now_seconds());  // else it is part of the start-up
}

void Accounts::message_ends(const Message& message) {
  if (!events_.on()) return;
  if (!message.sent && !started_) events_.start_up(message_);
  events_.message(message.sent ? Event::Kind::kSend : Event::Kind::kReceive, message.stage, message.peer,
                  message.micro_batch, message.bytes, message_);
}

void Accounts::device_is_done() {
  if (!started_) idle(IdleCause::kStartUp, times_.begin, now_seconds());  // nothing has run
  if (!device_times_.any()) return;
  const DeviceTimes::Totals device = device_times_.take(stage_times_);
  times_.busy = device.busy;
  times_.idle = device.idle;
}

void Accounts::update_begins() {
  wait_ = now_seconds();
  events_.open(Event::Kind::kOptimizer, -1, -1, wait_);
}

void Accounts::update_ends(const UpdateTimes& update) {
  for (const auto& [begin, end] : update.waits) {
    events_.pause(begin);
    events_.idle(IdleCause::kTail, begin, end);
    events_.resume(end);
  }
  const double put_in = now_seconds();
  device_.compute().wait_on_host();  // other ranks read what the update wrote
  const double end = now_seconds();
  times_.optimizer = update.busy + end - put_in;
  times_.exposed = update.exposed;
  events_.close(end);
  times_.idle[static_cast<int>(IdleCause::kTail)] += end - wait_ - times_.optimizer;
}

RankAccount Accounts::end_step(size_t instructions) {
  times_.end = now_seconds();
  times_.instructions = static_cast<int64_t>(instructions);
  times_.products = product_time() - products_;
  // A device runs products later: their seconds would be those of launching them.
  if (device_.asynchronous()) times_.products.seconds = 0;
  times_.allocations = BlockCache::allocations() - allocations_;
  times_.busy += times_.optimizer;
  if (!device_.asynchronous()) {
    for (const StageTimes& times : stage_times_) times_.busy += times.forward + times.backward_p1 + times.backward_p2;
  }
  if (!timed_) {
    times_.busy = kUnknown;
    times_.idle.fill(kUnknown);
    for (StageTimes& times : stage_times_) times.forward = times.backward_p1 = times.backward_p2 = kUnknown;
  }
  RankAccount account;
  account.times = times_;
  account.events = events_.take();
  account.stages = stage_times_;
  for (const auto& stage : stages_) account.stage_memory.push_back(meter_.stage_use(stage->index()));
  account.memory = meter_.rank_use(rank_);
  return account;
}

}  // namespace twobp
