// The order of what the planner found: by throughput, but that of the fastest, which a prediction does not
// tell apart, one with little memory comes first.
#pragma once

#include <cstddef>
#include <vector>

#include "twobp/plan/planner.h"

namespace twobp {

// Into `best`, which has the fastest first and of equals the one with less memory, and keeps at most `most`.
void insert_by_speed(std::vector<PlanChoice>& best, const PlanChoice& choice, size_t most);

// So many of the fastest are compared by memory.
inline constexpr size_t kCompared = 30;

// Of those of the first kCompared that are within 1 % of the fastest, the fastest whose memory is within 5 %
// of the least: a simulation and the run that it stands for differ by about so much. `best`: as
// insert_by_speed leaves it, not empty.
std::vector<PlanChoice>::iterator lightest_of_fastest(std::vector<PlanChoice>& best);

}  // namespace twobp
