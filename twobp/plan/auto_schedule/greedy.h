// Internal to the auto-scheduler: list scheduling. As soon as a rank is free, it takes the ready op that a rule
// prefers. Many rules are tried. A look ahead decides whether a W fits before the next message, and whether a
// micro-batch may begin: under a cap, only if those under way can all still be finished.
#pragma once

#include <cstdint>
#include <vector>

#include "twobp/plan/auto_schedule/problem.h"

namespace twobp {

struct GreedyRule {
  enum class Prefer : uint8_t { kBackward, kForward, kLongestTail };
  Prefer prefer = Prefer::kBackward;
  bool deepest_forward = true;  // with F of several stages ready: the one nearest to the end
  // The most micro-batches that a rank has begun (from F of its first stage to I of it). The limit is this factor times
  // the duration of the way there and back, in rounds of the busiest rank; 0: no limit.
  double in_flight = 1;
  // The same, from F to W.
  double unfinished = 0;
  // W starts in a wait if at least this part of it fits; 0: always.
  double w_fits = 0;
  double noise = 0;  // added to the preference, as a fraction of the tail
  double fuse = 0;   // how often a backward with a stash bigger than its activations is fused under a cap
  uint64_t seed = 0;
};

// `count` rules to try, the most promising first. After some fixed rules, the others are drawn with `seed`.
std::vector<GreedyRule> greedy_rules(int count, uint64_t seed);

// Finds an order that fits. Returns no ranks if there is no room for its next op, which happens under caps near the
// least if the bytes of layers do not add up to zero over F, I and W.
TaskOrder greedy_order(const PipelineProblem& problem, const GreedyRule& rule);

}  // namespace twobp
