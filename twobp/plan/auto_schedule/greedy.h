// Internal to the auto-scheduler: list scheduling. Every rank, as soon as it is free, takes the ready op that
// a rule prefers; many rules are tried. A look ahead tells whether a W fits before the next message, and
// whether a micro-batch may be let in: under a cap only where those that are under way can all be finished.
#pragma once

#include <cstdint>
#include <vector>

#include "twobp/plan/auto_schedule/problem.h"

namespace twobp {

struct GreedyRule {
  enum class Prefer : uint8_t { kBackward, kForward, kLongestTail };
  Prefer prefer = Prefer::kBackward;
  bool deepest_forward = true;  // of several stages' F: the one nearest to the end
  // Micro-batches a rank lets in at most (F of its first stage to I of it): this times what the way there and
  // back takes, in rounds of the busiest rank; 0: no limit.
  double in_flight = 1;
  // The same, until W.
  double unfinished = 0;
  // W starts in a wait if this part of it at least fits; 0: always.
  double w_fits = 0;
  double noise = 0;  // of the preference, as a part of the tail
  double fuse = 0;   // how often a backward whose stash is bigger than its activations runs fused under a cap
  uint64_t seed = 0;
};

// Rules to try, the most promising first; `count` of them, those behind the fixed ones drawn with `seed`.
std::vector<GreedyRule> greedy_rules(int count, uint64_t seed);

// Always finds an order, and one that fits.
TaskOrder greedy_order(const PipelineProblem& problem, const GreedyRule& rule);

}  // namespace twobp
