#include "twobp/schedule/w_queue.h"

#include <algorithm>

namespace twobp {

WQueue::WQueue(const Schedule& schedule, int rank, const Rules& rules)
    : micro_batches_(schedule.micro_batches), rules_(rules) {
  for (int stage = 0; stage < schedule.stages; ++stage) {
    if (schedule.rank_of_stage[stage] == rank) stages_.push_back(stage);
  }
  index_.assign(stages_.size() * micro_batches_, -1);
  ended_.assign(stages_.size(), 0);
}

size_t WQueue::local(int stage) const {
  return static_cast<size_t>(std::find(stages_.begin(), stages_.end(), stage) - stages_.begin());
}

const WQueue::Slot* WQueue::find(int stage, int micro_batch) const {
  const int index = index_[local(stage) * micro_batches_ + micro_batch];
  return index < 0 ? nullptr : &slots_[index];
}

int WQueue::ran(int stage, int micro_batch) const {
  const Slot* slot = find(stage, micro_batch);
  return slot == nullptr ? 0 : slot->ran;
}

int WQueue::left(int stage, int micro_batch) const {
  const Slot* slot = find(stage, micro_batch);
  return slot == nullptr ? 0 : slot->made - slot->ran;
}

void WQueue::begin_p1(int stage, int micro_batch) {
  index_[local(stage) * micro_batches_ + micro_batch] = static_cast<int>(slots_.size());
  slots_.push_back({stage, micro_batch});
  open_ = true;
}

void WQueue::add(int units) {
  Slot& slot = slots_.back();
  slot.made += units;
  pending_ += units;
  if (streams(slot.stage)) streamed_ += units;
  if (held_back(slot.stage)) held_back_ += units;
}

void WQueue::end_p1() {
  const int stage = slots_.back().stage;
  const bool was_held_back = held_back(stage);
  ++ended_[local(stage)];
  open_ = false;
  if (!was_held_back || held_back(stage)) return;
  for (const Slot& slot : slots_) held_back_ -= slot.stage == stage ? slot.made - slot.ran : 0;
}

WUnits WQueue::take(Slot& slot, int count) {
  const WUnits units{slot.stage, slot.micro_batch, slot.ran, count};
  slot.ran += count;
  pending_ -= count;
  if (streams(slot.stage)) streamed_ -= count;
  if (held_back(slot.stage)) held_back_ -= count;
  ran_ += count;
  return units;
}

std::optional<WUnits> WQueue::take_oldest() {
  if (pending_ == streamed_) return take_of_ended_stage();
  const auto passed = [&](const Slot& slot) { return slot.ran == slot.made || streams(slot.stage); };
  while (passed(slots_[head_]) && (head_ + 1 < slots_.size() || !open_)) ++head_;
  return take(slots_[head_]);
}

std::optional<WUnits> WQueue::take_filling() {
  if (rules_.order == P2Order::kBucket && (rules_.completes_first || streamed_ > 0)) {
    if (const auto units = take_of_ended_stage()) return units;
  }
  return take_oldest();
}

std::optional<WUnits> WQueue::take_of_ended_stage() {
  for (size_t s = stages_.size(); s-- > 0;) {
    if (ended_[s] < micro_batches_) continue;
    Slot* next = nullptr;  // the one with the earliest unit; the oldest of these
    for (Slot& slot : slots_) {
      if (slot.stage != stages_[s] || slot.ran == slot.made) continue;
      if (next == nullptr || slot.ran < next->ran) next = &slot;
    }
    if (next != nullptr) return take(*next);
  }
  return std::nullopt;
}

std::optional<WUnits> WQueue::take_placed(size_t instruction) {
  if (rules_.places == nullptr || ran_ >= (*rules_.places)[instruction]) return std::nullopt;
  return take_filling();
}

std::optional<WUnits> WQueue::take_rest(int stage, int micro_batch) {
  const int units = left(stage, micro_batch);
  if (units == 0 || streams(stage)) return std::nullopt;
  return take(slots_[index_[local(stage) * micro_batches_ + micro_batch]], units);
}

std::optional<WUnits> WQueue::take_next(int stage, int micro_batch) {
  if (left(stage, micro_batch) == 0 || streams(stage)) return std::nullopt;
  return take(slots_[index_[local(stage) * micro_batches_ + micro_batch]]);
}

std::vector<WUnits> WQueue::take_same(const WUnits& unit, int first, int last) {
  std::vector<WUnits> same;
  for (Slot& slot : slots_) {
    if (slot.stage != unit.stage || slot.micro_batch < first || slot.micro_batch >= last) continue;
    if (slot.ran == unit.first && slot.made > unit.first) same.push_back(take(slot));
  }
  return same;
}

bool takes_turns(const Schedule& schedule, bool fills_waits) {
  return schedule.rank_count() == 1 && schedule.slices == 1 && (fills_waits || !schedule.has_backward());
}

bool may_turn(const Instruction& lead, const Instruction& next) {
  const bool feeds = lead.op == Op::kForward && lead.micro_batch == next.micro_batch;
  return next.op == Op::kForward && next.count == 1 && lead.count == 1 && !feeds;
}

WTail w_tail(const std::vector<Instruction>& list, P2Order order, const std::vector<bool>& gives_gradient) {
  WTail tail{list.size(), list.size()};
  while (tail.begin > 0 && list[tail.begin - 1].op == Op::kBackwardP2) --tail.begin;
  if (order != P2Order::kBucket || tail.begin == 0) return tail;
  const Instruction& before = list[tail.begin - 1];
  if (before.op == Op::kBackwardP1 && before.count == 1 && !gives_gradient[before.stage]) tail.last_p1 = tail.begin - 1;
  return tail;
}

}  // namespace twobp
