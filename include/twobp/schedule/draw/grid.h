// A schedule as text: one line for each rank, time to the right.
#pragma once

#include <string>

#include "twobp/schedule/schedule.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

struct GridOptions {
  bool color = false;  // ANSI background colours: F blue, I orange, W green, in shades
                       // for the stages of a rank; idle dim
  int max_width = 0;   // columns; a longer grid is wrapped into panels of that width; 0: never wrapped
};

// Draws the simulated timeline to scale. One cell stands for `unit` time and is as wide as the widest label ("F12", or
// "2F12" if a rank has several stages) and a space. An op spans the cells from round(begin / unit) to round(end /
// unit), at least one. Idle cells are dots, the optimizer is "O".
// Throws Error if unit is not above 0 or the grid would have more than 20 million cells.
std::string draw_grid(const Schedule& schedule, const Simulation& simulation, double unit,
                      const GridOptions& options = {});

// Draws the instruction lists, one line for each rank. If marked_rank >= 0, one cell is marked >like this<, and of a
// schedule too big for a screen only the neighbourhood of the mark is shown.
std::string draw_instructions(const Schedule& schedule, int marked_rank = -1, int marked_index = -1);

}  // namespace twobp
