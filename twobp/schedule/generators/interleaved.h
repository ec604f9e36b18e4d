// Schedules on a looped placement: stage s on rank s mod N, v = stages / N of them a rank ("model chunks"),
// for any N, v and M >= 1.
#pragma once

#include "twobp/schedule/schedule.h"

namespace twobp {

// The micro-batches go in max(1, M / N) rounds, as even as possible (the first ones the larger), each through
// all chunks of a rank before the next: depth first. A rank takes in a round for each chunk but the last, and
// two more F for each rank behind it, then one F, one B. With M a multiple of N the bubble is (N - 1) / v of
// the time of a rank's micro-batch over all its chunks, against N - 1 of 1F1B (arXiv 2104.04473,
// section 2.2).
Schedule interleaved_one_forward_one_backward(int stages, int ranks, int micro_batches);

// The same with W placed by itself: one more F for each rank behind, and as many stages' micro-batches in
// flight on every rank as the first has of them then: vN where M is a multiple of N. With v = 1 it is ZB-H1.
Schedule interleaved_zero_bubble(int stages, int ranks, int micro_batches);

// Breadth first: all micro-batches through a chunk before the next, then all B, last chunk first (arXiv
// 2211.05953). B runs in micro-batch order, so that gradients are those of the other schedules to the bit.
Schedule looped_bfs(int stages, int ranks, int micro_batches);

}  // namespace twobp
