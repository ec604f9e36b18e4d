// Internal to the generators: a rank's instructions in the order of a timetable.
#pragma once

#include <vector>

#include "twobp/schedule/schedule.h"

namespace twobp {

// The time of micro-batch m: bursts of `burst` micro-batches begin every `period` units. Within a burst they are
// `apart` units apart.
struct Rhythm {
  int period = 1;
  int burst = 1;
  int apart = 0;

  long long time(int m) const {
    return static_cast<long long>(m / burst) * period + static_cast<long long>(m % burst) * apart;
  }
};

// `op` of all micro-batches of a stage. The first is at `begin`, the others follow in the rhythm.
struct Lane {
  Op op = Op::kForward;
  int stage = 0;
  long long begin = 0;
};

// Appends all lanes to the rank's list in order of time (at equal times in the order given).
void append_lanes(Schedule& schedule, int rank, const Rhythm& rhythm, const std::vector<Lane>& lanes);

}  // namespace twobp
