// A simulated schedule as an SVG picture for papers and pages: a row per rank, time to the right.
#pragma once

#include <string>

#include "twobp/schedule/schedule.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

struct SvgOptions {
  std::string title{};   // UTF-8; empty: none
  int width = 1200;      // CSS pixels
  double until = 0;      // where the time axis ends, to compare pictures; 0, or too early: with the step
  bool seconds = false;  // times are seconds: the axis says ms or s; else they have no unit
};

// Self-contained SVG 1.1 with text as text, on a white ground of its own, in the colours of the HTML timeline
// (safe for the colour-blind: Okabe and Ito). Where a rank has several stages, later ones are in lighter
// shades. Micro-batch numbers stand where they fit. Rows get thinner with many ranks; the picture is at most
// about 4000 pixels high. Throws Error when the simulation has no timeline or is of another schedule, when
// the width is not 300 to 20000, and when there are more than 200000 ops to draw.
std::string draw_svg(const Schedule& schedule, const Simulation& simulation, const SvgOptions& options = {});

}  // namespace twobp
