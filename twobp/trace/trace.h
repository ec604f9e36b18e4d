// Chosen steps in the Trace Event Format (a JSON array), which https://ui.perfetto.dev and chrome://tracing
// open: a track per rank with its ops, waits and messages, arrows from sends to receives, memory per rank.
#pragma once

#include <string>

#include "twobp/trace/recorder.h"

namespace twobp {

std::string trace_json(const Trace& trace);

}  // namespace twobp
