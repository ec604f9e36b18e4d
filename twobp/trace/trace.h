// Chosen steps in the Trace Event Format (a JSON array), for https://ui.perfetto.dev and chrome://tracing. Each rank
// has a track with its ops, waits and messages. Arrows go from sends to receives. The memory of each rank is shown,
// too.
#pragma once

#include <string>

#include "twobp/trace/recorder.h"

namespace twobp {

// The track of whole steps; those of the ranks follow. Perfetto does not accept track 0, and shows the process's own
// number first.
inline constexpr int kStepTrack = 1;

std::string trace_json(const Trace& trace);

}  // namespace twobp
