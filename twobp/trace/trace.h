// Chosen steps in the Trace Event Format (a JSON array), which https://ui.perfetto.dev and chrome://tracing
// open: a track per rank with its ops, waits and messages, arrows from sends to receives, memory per rank.
#pragma once

#include <string>

#include "twobp/trace/recorder.h"

namespace twobp {

// The track of whole steps; the ranks' follow. Perfetto takes no track 0, and shows the process's own number
// first.
inline constexpr int kStepTrack = 1;

std::string trace_json(const Trace& trace);

}  // namespace twobp
