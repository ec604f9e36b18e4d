#include "twobp/pipeline/executor/event_log.h"

#include <utility>

#include "twobp/nn/layers/recompute.h"

namespace twobp {
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
