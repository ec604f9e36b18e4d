// Lets the ranks of one process give up a step, or a batch of an evaluation, at any instruction. From then on
// F, I and W do nothing, but messages still go to their receivers, so that none is left for a later step.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <utility>

namespace twobp {

class EarlyEnd {
 public:
  // `asked`: whether the step should be given up. Every rank calls it.
  explicit EarlyEnd(std::function<bool()> asked) : asked_(std::move(asked)) {}

  // Whether this rank skips its work from now on. True on all ranks once it is true on one.
  bool skips() {
    State state = state_;
    if (state == State::kRuns && asked_() && state_.compare_exchange_strong(state, State::kGivenUp))
      return true;
    return state == State::kGivenUp;
  }
  // Called when a rank of a training step has done all its instructions, before the update. Returns false if
  // the step is given up. Otherwise no rank can give it up any more.
  bool completes() {
    State state = State::kRuns;
    state_.compare_exchange_strong(state, State::kWhole);
    return state != State::kGivenUp;
  }
  bool given_up() const { return state_ == State::kGivenUp; }

 private:
  enum class State : uint8_t { kRuns, kWhole, kGivenUp };
  std::function<bool()> asked_;
  std::atomic<State> state_{State::kRuns};
};

}  // namespace twobp
