// Asks whether the run is to end. The ranks of one process may give up a step, or a batch of an evaluation, at any
// instruction. From then on F, I and W do nothing, but messages still go to their receivers, so that none is left for a
// later step.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <utility>

namespace twobp {

class EarlyEnd {
 public:
  // `asked`: whether this process wants the run to end. Every rank calls it if the step may be given up; else it is
  // called when the ranks are done. A step may not be given up if it overlaps with another one, is launched as a graph,
  // has wanted events, or is part of a run of several processes or replicas.
  EarlyEnd(std::function<bool()> asked, bool may_give_up) : asked_(std::move(asked)), may_give_up_(may_give_up) {}

  bool asked() const { return asked_(); }
  bool may_give_up() const { return may_give_up_; }
  // Whether this rank skips its work from now on. True on all ranks once it is true on one.
  bool skips() {
    if (!may_give_up_) return false;
    State state = state_;
    if (state == State::kRuns && asked_() && state_.compare_exchange_strong(state, State::kGivenUp)) return true;
    return state == State::kGivenUp;
  }
  // Called when a rank of a training step has done all its instructions, before the update. Returns false if the step
  // is given up. Otherwise no rank can give it up any more.
  bool completes() {
    State state = State::kRuns;
    state_.compare_exchange_strong(state, State::kWhole);
    return state != State::kGivenUp;
  }
  bool given_up() const { return state_ == State::kGivenUp; }

 private:
  enum class State : uint8_t { kRuns, kWhole, kGivenUp };
  std::function<bool()> asked_;
  bool may_give_up_;
  std::atomic<State> state_{State::kRuns};
};

}  // namespace twobp
