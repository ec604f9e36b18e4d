// Internal to the auto-scheduler: local search. It is a tabu search over the orders of the ranks, as in job-shop
// scheduling. Only moves of an op to the edge of its block on a critical path can shorten the step (Nowicki and
// Smutnicki, "A fast taboo search algorithm for the job shop problem", Management Science 42, 1996; moves across the
// block: Balas and Vazacopoulos, Management Science 44, 1998). Moves keep micro-batch order, caps and acyclicity.
#pragma once

#include <cstdint>

#include "twobp/plan/auto_schedule/problem.h"

namespace twobp {

struct SearchResult {
  TaskOrder order;
  double seconds = 0;
  long iterations = 0;
};

// The step time of an order. Infinite if the order deadlocks.
double order_seconds(const PipelineProblem& problem, const TaskOrder& order);

// Makes up to `iterations` moves from `start`, which must fit. Ends early at `good_enough` seconds. The result is never
// worse than `start`, and the same for the same seed.
SearchResult improve_order(const PipelineProblem& problem, TaskOrder start, long iterations, double good_enough,
                           uint64_t seed);

}  // namespace twobp
