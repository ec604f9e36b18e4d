// Chimera (arXiv 2107.06925): two copies of the model on the same ranks, one from the first rank to the last,
// the other the other way, each with half of the micro-batches, so that each fills the other's bubble.
#pragma once

#include "twobp/schedule/schedule.h"

namespace twobp {

// `stages` = 2N on N ranks, N even: stages 0 to N - 1 are the copy that goes down, N to 2N - 1 the one that
// goes up (Schedule::replicas is 2). `micro_batches` is what the step has in all, an even number: each copy
// runs half of them, and Schedule::micro_batches is that half. With F and B of one unit and a multiple of N
// micro-batches, the bubble is N - 2 units; B of two units makes it longer. Units of N micro-batches follow
// one another directly.
//
// Both copies' gradients must be summed before the optimizer step; that message is not in the schedule. To be
// simulated, not run. Throws Error for odd N or M.
Schedule chimera(int stages, int ranks, int micro_batches);

}  // namespace twobp
