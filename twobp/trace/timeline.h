// Draws chosen steps as one self-contained HTML file: every rank's ops as they ran, its memory below them, and the
// sums. If there is a prediction (Trace::predicted), it is drawn above each step on the same time scale. The page
// itself is timeline.html; the data is inserted into it.
#pragma once

#include <string>

#include "twobp/trace/recorder.h"

namespace twobp {

std::string timeline_html(const Trace& trace);

}  // namespace twobp
