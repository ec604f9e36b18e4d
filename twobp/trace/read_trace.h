// A trace that trace.h wrote, read back: to set the run beside its prediction.
#pragma once

#include <string>

#include "twobp/trace/recorder.h"

namespace twobp {

// Of the steps, their times, losses and events (without layer and unit numbers) are there again; `run` is.
// `origin` names the text in messages. Throws Error for anything that trace_json does not write, and for
// traces of other programs: what is wrong, and that `twobp train --trace` makes one.
Trace parse_trace(const std::string& text, const std::string& origin);

// From a file of at most 1 GiB. Throws Error naming it.
Trace read_trace(const std::string& path);

}  // namespace twobp
