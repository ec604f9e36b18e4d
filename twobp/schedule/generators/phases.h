// Internal to the generators: a rank's instructions as phases. Each phase is a short sequence that is repeated.
#pragma once

#include <array>
#include <vector>

#include "twobp/schedule/schedule.h"

namespace twobp {

// An op on the next micro-batch of one of the rank's two stages, the lower one (0) or the upper one (1). With kOldest
// as the chunk of a W: the pending W of either stage whose I is the oldest, if any is pending.
struct PhaseStep {
  Op op = Op::kForward;
  int chunk = 0;
};
inline constexpr int kOldest = -1;  // as the chunk of a W

struct Phase {
  int times = 0;  // 0 or less: none
  std::vector<PhaseStep> steps;
};

// Appends the phases to the list of a rank that has these two stages. Every stage takes its micro-batches in order.
// Steps after the last micro-batch are left out, so phases may be written for more micro-batches than exist.
void append_phases(Schedule& schedule, int rank, std::array<int, 2> stages, const std::vector<Phase>& phases);

}  // namespace twobp
