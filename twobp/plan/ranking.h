// The order of the planner's results. They are sorted by throughput, with one exception: a prediction cannot tell the
// fastest ones apart, so one of these with little memory comes first.
#pragma once

#include <cstddef>
#include <vector>

#include "twobp/plan/planner.h"

namespace twobp {

// Inserts into `best`, which is sorted by speed, then by least memory, and keeps at most `most` entries.
void insert_by_speed(std::vector<PlanChoice>& best, const PlanChoice& choice, size_t most);

// Only this many of the fastest are compared by memory.
inline constexpr size_t kCompared = 30;

// Considers those of the first kCompared that are within 1 % of the fastest. Returns the fastest whose memory is within
// 5 % of the least among them. A simulation differs from the real run by about this much. `best`: as insert_by_speed
// leaves it, not empty.
std::vector<PlanChoice>::iterator lightest_of_fastest(std::vector<PlanChoice>& best);

}  // namespace twobp
