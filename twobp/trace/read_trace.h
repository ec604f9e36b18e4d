// Reads a trace that trace.h wrote, to compare the run with its prediction.
#pragma once

#include <string>

#include "twobp/trace/recorder.h"

namespace twobp {

// Restores `run`, and the steps' times, losses and events (without layer and unit numbers). `origin` names the text in
// messages. Throws Error for any text that trace_json does not write, and for traces of other programs. The message
// says what is wrong, and that `twobp train --trace` makes a trace.
Trace parse_trace(const std::string& text, const std::string& origin);

// Reads a file of at most 1 GiB. Throws Error naming it.
Trace read_trace(const std::string& path);

}  // namespace twobp
