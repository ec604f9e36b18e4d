// A simulated schedule as an SVG picture for papers and pages: one row for each rank, time to the right.
#pragma once

#include <string>

#include "twobp/schedule/schedule.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

struct SvgOptions {
  std::string title{};  // UTF-8; empty: none
  int width = 1200;     // CSS pixels
  double until = 0;     // end of the time axis, to compare pictures; 0, or less than the step: the step's end
};

// Self-contained SVG 1.1, with text as text, on its own white background. The colours are safe for the
// colour-blind (Okabe and Ito). If a rank has several stages, later ones have lighter shades. Micro-batch
// numbers are drawn where they fit. Rows get thinner with many ranks; the picture is at most about 4000
// pixels high. Throws Error if the simulation has no timeline or is of another schedule, if the width is not
// 300 to 20000, or if there are more than 200000 ops to draw.
std::string draw_svg(const Schedule& schedule, const Simulation& simulation, const SvgOptions& options = {});

}  // namespace twobp
