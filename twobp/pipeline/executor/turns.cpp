#include "twobp/pipeline/executor/turns.h"

#include <algorithm>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/pipeline/stage.h"
#include "twobp/transport/message.h"

namespace twobp {
namespace {

// Exchanges of experts of one call of a layer: a tag has numbers for as many, in F and in I.
constexpr int kExchanges = 64;

}  // namespace

void StepLoop::Experts::at(const Stage& stage, int layer, int micro_batch, bool backward) {
  if (stage_ != &stage || tag_.micro_batch != micro_batch || backward_ != backward) over_ = 0;
  stage_ = &stage;
  layer_ = layer;
  backward_ = backward;
  tag_ = {loop_.request_.step, 2 * (stage.first_layer() + layer) + (backward ? 1 : 0), micro_batch,
          MessageKind::kExperts};
  number_ = 0;
}

bool StepLoop::Experts::count(const at::Tensor& tokens) {
  loop_.observer_.experts_chosen(tag_.stage / 2, tokens);
  return true;
}

void StepLoop::Experts::send(std::vector<Values> messages) {
  TWOBP_CHECK(members_ != nullptr, "a layer has a part of its experts, but there is no group with the others");
  TWOBP_CHECK(number_ < kExchanges, "a layer exchanges tokens of experts more than ", kExchanges, " times");
  for (int step = 1; step < members_->size(); ++step) {
    const int to = (members_->rank() + step) % members_->size();
    members_->isend(to, tag(), std::move(messages[static_cast<size_t>(to)]));
  }
}

std::vector<Values> StepLoop::Experts::receive() {
  std::vector<Values> received(static_cast<size_t>(members_->size()));
  loop_.interrupt([&] {
    for (int step = 1; step < members_->size(); ++step) {
      const int from = (members_->rank() + step) % members_->size();
      MessageWait message(*members_, from, tag(), WaitCause::kExperts);
      loop_.wait(message);
      received[static_cast<size_t>(from)] = std::move(message.values);
    }
  });
  ++number_;
  ++over_;
  return received;
}

double StepLoop::Experts::room() const {
  double held = 0;
  double room = 0;
  const int end = backward_ ? stage_->first_backward() - 1 : stage_->layer_count();
  for (int i = layer_; i != end; i += backward_ ? -1 : 1) {
    const LayerCost& cost = loop_.cost(*stage_, i, tag_.micro_batch);
    const double more = backward_ ? cost.p1_held : cost.forward_held;
    room = std::max(room, held + loop_.need(backward_ ? cost.p1_peak : cost.forward_peak, more));
    held += more;
  }
  return room;
}

Tag StepLoop::Experts::tag() const {
  Tag tag = tag_;
  tag.stage = tag.stage * kExchanges + number_;
  return tag;
}

StepLoop::Turns::Turns(StepLoop& loop)
    : loop_(loop),
      on_(loop.parts_.experts != nullptr && takes_turns(loop.plan_.schedule, loop.plan_.fills_waits)),
      first_(loop),
      second_(loop) {}

void StepLoop::Turns::end() {
  if (begun_) loop_.parts_.companion->end();
}

bool StepLoop::Turns::take(const Wait& awaited) {
  if (!on_ || awaited.cause() != WaitCause::kExperts) return false;
  if (!begun_) return begin();
  if (*begun_ == loop_.at_ || !loop_.parts_.companion->busy()) return false;
  if (loop_.parts_.companion->awaits() == nullptr ? lacks_room(need_) : !awaits_tokens() || !ready()) return false;
  go_on();
  return true;
}

bool StepLoop::Turns::awaits_tokens() const {
  if (!begun_ || *begun_ == loop_.at_) return false;
  const Companion& second = *loop_.parts_.companion;
  const bool overtakes = !first_.backward() && first_.over() <= second_.over();
  return second.busy() && second.awaits() != nullptr && !overtakes;
}

bool StepLoop::Turns::ready() const {
  return loop_.parts_.companion->awaits()->ready();
}

bool StepLoop::Turns::begin() {
  const std::vector<Instruction>& list = loop_.plan_.schedule.ranks[loop_.parts_.rank];
  const size_t next = loop_.at_ + 1;
  if (!loop_.whole_ || next == list.size() || !may_turn(list[loop_.at_], list[next])) return false;
  const Instruction& instruction = list[next];
  const int s = loop_.local(instruction.stage);
  const int mb = instruction.micro_batch;
  if (loop_.has_cap()) {
    const LayerCost& cost = loop_.cost(loop_.stage(s), 0, mb);
    if (lacks_room(loop_.need(cost.forward_peak, cost.forward_held))) return false;
  }
  if (!loop_.parts_.companion) loop_.parts_.companion = std::make_unique<Companion>(loop_.parts_.meter);
  begun_ = next;
  loop_.observer_.turn_passes();
  loop_.parts_.companion->begin(
      [this, &instruction, s, mb] { loop_.naming(instruction, [&] { loop_.forward(s, mb); }); });
  loop_.observer_.turn_passes();
  return true;
}

void StepLoop::Turns::go_on() {
  loop_.observer_.turn_passes();
  loop_.parts_.companion->go_on();
  loop_.observer_.turn_passes();
}

void StepLoop::Turns::make_room(double need) {
  while (is_second() && *begun_ != loop_.at_ && lacks_room(need)) {
    need_ = need;
    loop_.interrupt([&] { yield(nullptr); });
  }
}

bool StepLoop::Turns::lacks_room(double need) const {
  return loop_.has_cap() && loop_.lacks_room(need + first_.room());
}

bool StepLoop::Turns::finish() {
  if (begun_ != loop_.at_) return false;
  Companion& second = *loop_.parts_.companion;
  while (second.busy()) {
    if (Wait* const awaits = second.awaits()) loop_.wait(*awaits);
    go_on();
  }
  begun_.reset();
  return true;
}

void StepLoop::Turns::rethrow() const {
  if (begun_ && loop_.parts_.companion->failure()) std::rethrow_exception(loop_.parts_.companion->failure());
}

}  // namespace twobp
