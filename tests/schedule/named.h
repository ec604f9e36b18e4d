// This file has helpers for tests over all named schedules.
#pragma once

#include <string_view>
#include <vector>

#include "tests/schedule/support.h"
#include "twobp/schedule/named_schedules.h"

namespace twobp {

// Returns the usual number of stages for `ranks` ranks.
inline int stages_on(std::string_view name, int ranks) {
  return ranks * usual_stages_per_rank(named_schedule(name).placement);
}

// Returns a random schedule, policy, number of ranks, of micro-batches and of slices that go together. Schedules that
// admit several stages a rank get several.
inline Schedule random_named_schedule(Random& random, int most_ranks, int most_micro_batches, int most_slices = 1) {
  const auto names = schedule_names();
  while (true) {
    const auto& name = names[random_int(random, 0, static_cast<int>(names.size()) - 1)];
    const int ranks = random_int(random, 1, most_ranks);
    const int micro_batches = random_int(random, 1, most_micro_batches);
    const bool looped = named_schedule(name).placement == Placement::kLooped;
    const int stages = looped ? ranks * random_int(random, 1, 4) : stages_on(name, ranks);
    const int slices = most_slices > 1 ? random_int(random, 1, most_slices) : 1;
    if (!admits(name, stages, ranks, micro_batches, slices)) continue;
    const auto policies = policies_of(name);
    const P2Policy policy = policies[random_int(random, 0, static_cast<int>(policies.size()) - 1)];
    return make_schedule(name, stages, micro_batches, policy, ranks, slices);
  }
}

}  // namespace twobp
