// Internal to the generators: a rank's instructions as phases, each a short sequence that is repeated.
#pragma once

#include <array>
#include <vector>

#include "twobp/schedule/schedule.h"

namespace twobp {

// An op on the next micro-batch of one of the rank's two stages: the lower one (0) or the upper one (1). With
// kOldestW, the W whose I ran longest ago, if one is pending, of either stage.
struct PhaseStep {
  Op op = Op::kForward;
  int chunk = 0;
};
inline constexpr int kOldest = -1;  // as the chunk of a W

struct Phase {
  int times = 0;  // 0 or less: none
  std::vector<PhaseStep> steps;
};

// Appends the phases to the list of a rank that has these two stages. Every stage takes its micro-batches in
// order; steps beyond the last one are left out, so phases for more micro-batches than there are stay valid.
void append_phases(Schedule& schedule, int rank, std::array<int, 2> stages, const std::vector<Phase>& phases);

}  // namespace twobp
