// Schedules on a looped placement: stage s on rank s mod N. Each rank has v = stages / N of them ("model chunks"). For
// any N, v and M >= 1. With `slices`, see classic.h; a round has whole micro-batches.
#pragma once

#include "twobp/schedule/schedule.h"

namespace twobp {

// The micro-batches go in max(1, M / N) rounds, as even as possible (the first ones are larger). Each round goes
// through all chunks of a rank before the next one: depth first. A rank first runs F of one round for each chunk but
// the last, and two more F for each rank after it. Then it alternates one F and one B. If M is a multiple of N, the
// bubble is (N - 1) / v times a rank's time for one micro-batch over all its chunks; that of 1F1B is N - 1 times (arXiv
// 2104.04473, section 2.2).
Schedule interleaved_one_forward_one_backward(int stages, int ranks, int micro_batches, int slices = 1);

// The same, with W placed by itself and only one more F for each rank after it. Every rank has at most as many
// micro-batches of stages in flight as the first rank has after these F: vN if M is a multiple of N. With v = 1 it is
// ZB-H1.
Schedule interleaved_zero_bubble(int stages, int ranks, int micro_batches, int slices = 1);

// Breadth first: all micro-batches go through a chunk before the next chunk, then all B, last chunk first (arXiv
// 2211.05953). B runs in micro-batch order, so the gradients equal those of the other schedules to the bit.
Schedule looped_bfs(int stages, int ranks, int micro_batches, int slices = 1);

}  // namespace twobp
