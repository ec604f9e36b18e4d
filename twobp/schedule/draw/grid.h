// A schedule as text: a line per rank, time to the right.
#pragma once

#include <string>

#include "twobp/schedule/schedule.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

struct GridOptions {
  bool color = false;  // ANSI background colours: F blue, I orange, W green, in shades
                       // for the stages of a rank; idle dim
  int max_width = 0;   // columns; a longer grid is wrapped into panels of that width; 0: never
};

// The simulated timeline drawn to scale: one cell of `unit` time is as wide as the widest label ("F12",
// "2F12" where a rank has several stages) and a space; an op spans the cells from round(begin / unit) to
// round(end / unit), at least one. Idle cells are dots, the optimizer is "O".
// Throws Error when unit is not above 0 or the grid would have more than 20 million cells.
std::string draw_grid(const Schedule& schedule, const Simulation& simulation, double unit,
                      const GridOptions& options = {});

// The instruction lists themselves, one line per rank, with one cell marked >like this< if
// marked_rank >= 0. With a mark, only the neighbourhood of a schedule too big for a screen is shown.
std::string draw_instructions(const Schedule& schedule, int marked_rank = -1, int marked_index = -1);

}  // namespace twobp
