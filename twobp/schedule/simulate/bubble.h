// Internal to this folder: attributes waits to causes. See BubbleCause.
#pragma once

#include <algorithm>

#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

// A rank waited from `begin` until `end` for a message sent at `sent`.
struct Wait {
  double begin = 0;
  double end = 0;
  double sent = 0;
  bool started = false;    // the rank's first F has run
  bool pending = false;    // W was pending
  bool splits_p2 = false;  // the rank's B is split into I and W
};

inline void book_wait(RankSimulation& rank, const Wait& wait) {
  const IdleCause cause = !wait.started  ? IdleCause::kStartUp
                          : wait.pending ? IdleCause::kMessage
                                         : IdleCause::kNothing;
  rank.idle[static_cast<int>(cause)] += wait.end - wait.begin;
  const double under_way = wait.end - std::clamp(wait.sent, wait.begin, wait.end);
  const BubbleCause before = !wait.started                     ? BubbleCause::kStartUp
                             : wait.pending || !wait.splits_p2 ? BubbleCause::kDependency
                                                               : BubbleCause::kNothing;
  rank.bubble[static_cast<int>(BubbleCause::kCommunication)] += under_way;
  rank.bubble[static_cast<int>(before)] += wait.end - wait.begin - under_way;
}

// Books the rest of the step after each rank's end. `done` is by rank.
void book_tails(Simulation& simulation, const std::vector<double>& done);

// Subtracts the imbalance from the other causes, once all ranks are done.
void book_imbalance(Simulation& simulation);

}  // namespace twobp
