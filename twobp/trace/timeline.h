// Chosen steps as one HTML file that needs nothing else: every rank's ops as they ran, its memory under them,
// and the sums; above each step what it is set against (Trace::predicted), if anything, on the same time
// scale. The page itself is timeline.html; the data is put into it.
#pragma once

#include <string>

#include "twobp/trace/recorder.h"

namespace twobp {

std::string timeline_html(const Trace& trace);

}  // namespace twobp
