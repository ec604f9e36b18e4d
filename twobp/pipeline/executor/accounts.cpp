#include "twobp/pipeline/executor/accounts.h"

#include <algorithm>
#include <utility>

#include "twobp/core/measure.h"
#include "twobp/core/text.h"
#include "twobp/models/recompute/recompute_layer.h"
#include "twobp/pipeline/memory/block_cache.h"

namespace twobp {

Accounts::Accounts(int rank, const std::vector<std::unique_ptr<Stage>>& stages, MemoryMeter& meter, Device device)
    : rank_(rank), stages_(stages), meter_(meter), device_(std::move(device)), events_(rank, meter) {}

void Accounts::begin_step(bool want_events, bool timed) {
  times_ = {};
  stage_times_.assign(stages_.size(), {});
  experts_.clear();
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
  StageTimes& stage = stage_times_[op_.stage];
  if (op_.seconds == &StageTimes::backward_p1) {
    stage.p2_units = units;
  } else {
    ++stage.micro_batches;
  }
}

void Accounts::experts_chosen(int layer, const at::Tensor& tokens) {
  std::vector<int64_t>& sums = experts_[layer];
  sums.resize(static_cast<size_t>(tokens.numel()));
  const auto* count = tokens.const_data_ptr<int64_t>();
  for (int64_t& sum : sums) sum += *count++;
}

void Accounts::w_begins() {
  w_ = now_seconds();
  w_products_ = product_time();
  w_event_ = device_times_.begin();
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

void Accounts::wait_begins(bool w_pending, WaitCause cause) {
  wait_ = now_seconds();
  for_sums_ = cause == WaitCause::kGradients;
  cause_ = cause == WaitCause::kExperts ? IdleCause::kExperts
           : for_sums_                  ? IdleCause::kTail
           : w_pending                  ? IdleCause::kMessage
                                        : IdleCause::kNothing;
}

void Accounts::wait_ends() {
  const double now = now_seconds();
  if (for_sums_) times_.exposed += now - wait_;
  if (started_) idle(cause_, wait_, now);  // else it is part of the start-up
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
  times_.optimizer = device.optimizer;
  times_.idle = device.idle;
}

void Accounts::update_begins() {
  update_ = now_seconds();
  update_event_ = device_times_.begin();
}

void Accounts::update_ends() {
  device_times_.end_update(update_event_);
  const double now = now_seconds();
  if (!device_.asynchronous()) times_.optimizer += now - update_;
  events_.early_update(update_, now);
}

void Accounts::last_update_begins() {
  wait_ = now_seconds();
  events_.open(Event::Kind::kOptimizer, -1, -1, wait_);
}

void Accounts::last_update_ends(const std::vector<Waited>& waits) {
  double waited = 0;
  for (const auto& [cause, begin, end] : waits) {
    waited += end - begin;
    if (cause == WaitCause::kGradients) times_.exposed += end - begin;
    events_.pause(begin);
    events_.idle(IdleCause::kTail, begin, end);
    events_.resume(end);
  }
  device_.compute().wait_on_host();  // other ranks read what the update wrote
  const double end = now_seconds();
  times_.optimizer += end - wait_ - waited;
  events_.close(end);
  times_.idle[static_cast<int>(IdleCause::kTail)] += waited;
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
  account.experts = experts_;
  for (const auto& stage : stages_) account.stage_memory.push_back(meter_.stage_use(stage->index()));
  account.memory = meter_.rank_use(rank_);
  return account;
}

void DeviceTimes::start(const Device& device, bool on) {
  on_ = on && device.asynchronous();
  spans_.clear();
  used_ = 0;
  if (!on_) return;
  compute_ = device.compute();
  step_ = record();
}

DeviceEvent DeviceTimes::record() {
  if (used_ == events_.size()) {
    events_.push_back(compute_.record_with_time());
  } else {
    compute_.record_again(events_[used_]);
  }
  return events_[used_++];
}

void DeviceTimes::open(double StageTimes::*seconds, int stage, IdleCause before) {
  if (on_) open_ = {seconds, stage, before, record(), {}};
}

void DeviceTimes::pause() {
  if (!on_) return;
  open_.end = record();
  spans_.push_back(open_);
}

void DeviceTimes::resume() {
  if (on_) open_.begin = record();
}

void DeviceTimes::end_p2(int stage, const DeviceEvent& begin) {
  if (on_) spans_.push_back({&StageTimes::backward_p2, stage, IdleCause::kMessage, begin, record()});
}

void DeviceTimes::end_update(const DeviceEvent& begin) {
  if (on_) spans_.push_back({nullptr, 0, IdleCause::kMessage, begin, record()});
}

DeviceTimes::Totals DeviceTimes::take(std::vector<StageTimes>& stages) {
  for (StageTimes& times : stages) times.forward = times.backward_p1 = times.backward_p2 = 0;
  Totals totals;
  double until = 0;  // since the step's begin
  for (const Span& span : std::exchange(spans_, {})) {
    const double begin = span.begin.seconds_since(step_);
    const double seconds = span.end.seconds_since(step_) - begin;
    const IdleCause cause = until == 0 ? IdleCause::kStartUp : span.before;
    totals.idle[static_cast<int>(cause)] += std::max(0.0, begin - until);
    if (span.seconds == nullptr) {
      totals.optimizer += seconds;
    } else {
      totals.busy += seconds;
      stages[span.stage].*span.seconds += seconds;
    }
    until = begin + seconds;
  }
  return totals;
}

namespace {

std::string_view without_suffix(std::string_view name) {
  constexpr std::string_view suffix = ".weight";
  return name.ends_with(suffix) ? name.substr(0, name.size() - suffix.size()) : name;
}

// The name of a leaf in the model: its weight's name. For weights stored as one:
// "model.layers.0.self_attn.q_proj+k_proj+v_proj".
std::string leaf_name(Layer& leaf, const std::string& layer_name) {
  // Its W covers all weights of the layer.
  if (dynamic_cast<RecomputeLayer*>(&leaf) != nullptr) return layer_name;
  const std::vector<Parameter*> parameters = parameters_of(leaf);
  if (parameters.empty()) return layer_name;
  std::string name;
  for (const ParameterPart& part : parameters.front()->parts()) {
    const std::string_view whole = without_suffix(part.name);
    if (name.empty()) {
      name = whole;
    } else {
      name += '+';
      name += whole.substr(whole.rfind('.') + 1);
    }
  }
  return name;
}

}  // namespace

void EventLog::start(bool on) {
  on_ = on;
  events_.clear();
  early_updates_ = 0;
  if (!on) return;
  begin_ = now_seconds();
  meter_.take_high_water(rank_);
}

void EventLog::open(Event::Kind kind, int stage, int micro_batch, double begin) {
  if (!on_) return;
  open_ = {};
  open_.kind = kind;
  open_.stage = stage;
  open_.micro_batch = micro_batch;
  open_.begin = begin;
  if (kind == Event::Kind::kOptimizer) open_.part = early_updates_;
}

void EventLog::pause(double at) {
  if (!on_) return;
  open_.end = at;
  add(open_);
  ++open_.part;
}

void EventLog::backward_p2(Layer& leaf, const std::string& layer_name, Event event) {
  if (!on_) return;
  const auto [name, is_new] = names_.try_emplace(&leaf);
  if (is_new) name->second = leaf_name(leaf, layer_name);
  event.kind = Event::Kind::kBackwardP2;
  event.name = name->second;
  add(std::move(event));
}

void EventLog::idle(IdleCause cause, double begin, double end) {
  if (!on_ || end <= begin) return;
  Event event;
  event.kind = Event::Kind::kIdle;
  event.cause = cause;
  event.begin = begin;
  event.end = end;
  add(std::move(event));
}

void EventLog::start_up(double end) {
  idle(IdleCause::kStartUp, events_.empty() ? begin_ : events_.back().end, end);
}

void EventLog::early_update(double begin, double end) {
  if (!on_) return;
  Event event;
  event.kind = Event::Kind::kOptimizer;
  event.part = early_updates_++;
  event.begin = begin;
  event.end = end;
  add(std::move(event));
}

void EventLog::message(Event::Kind kind, int stage, int peer, int micro_batch, int64_t bytes, double begin) {
  if (!on_) return;
  Event event;
  event.kind = kind;
  event.stage = stage;
  event.peer = peer;
  event.micro_batch = micro_batch;
  event.bytes = bytes;
  event.begin = begin;
  event.end = now_seconds();
  add(std::move(event));
}

void EventLog::add(Event event) {
  event.held = meter_.held(rank_);
  event.peak = meter_.take_high_water(rank_);
  event.total = meter_.rank_use(rank_).total();
  events_.push_back(std::move(event));
}

void stretch_to_step(std::vector<Event>& events, double begin, double done, double end) {
  if (events.empty()) return;
  if (events.front().kind == Event::Kind::kIdle) events.front().begin = begin;
  Event tail;
  tail.kind = Event::Kind::kIdle;
  tail.cause = IdleCause::kTail;
  tail.begin = done;
  tail.end = end;
  tail.held = events.back().held;
  tail.total = tail.peak = events.back().total;
  events.push_back(std::move(tail));
}

}  // namespace twobp
