// Simulation options for this program's own transport between ranks that are threads of one process.
#pragma once

#include <cstdint>
#include <vector>

#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

// A message takes no time of its own. Its memory is on its sender's account until the receiver takes it. `caps` in
// bytes, by rank; 0, or empty: none. Without timeline.
inline SimulationOptions in_process_simulation(const std::vector<int64_t>& caps = {}) {
  SimulationOptions options;
  options.message_holder = MessageHolder::kSender;
  options.cap_per_rank.assign(caps.begin(), caps.end());
  options.timeline = false;
  return options;
}

}  // namespace twobp
