// The schedules of the paper (arXiv 2405.18047, section 3), with one stage on each rank, for any number of stages N >=
// 1 and micro-batches M >= 1 (including M < N, and M that is not a multiple of N). They write F and B only; passes.h
// does the rest.
//
// With `slices` k, every micro-batch is cut into k slices (Schedule::slices), and a schedule is that of k M
// micro-batches whose F are k - 1 further ahead of their B, because the last slice's B comes first.
#pragma once

#include <string_view>
#include <vector>

#include "twobp/schedule/schedule.h"

namespace twobp {

// One micro-batch after another goes through all stages and back.
Schedule naive(int stages, int micro_batches, int slices = 1);
// All F, then all B, each in micro-batch order.
Schedule gpipe(int stages, int micro_batches, int slices = 1);
// One forward, one backward: stage s runs min(N - s, M) F, then alternates B and F, then runs the remaining B.
Schedule one_forward_one_backward(int stages, int micro_batches, int slices = 1);
// 1F1B that first runs min(2(N - s) - 1, M) F. These are as many as can run before the first gradient could be back.
// Messages thus have time to travel, at almost twice the memory (arXiv 2211.05322, "eager 1F1B").
Schedule eager_one_forward_one_backward(int stages, int micro_batches, int slices = 1);
// F only, on any placement, for evaluation and inference. A rank with several stages first runs the F of the latest of
// its stages.
Schedule forward_only(const std::vector<int>& rank_of_stage, int micro_batches);

// The empty schedule that every generator starts from. Throws Error for no stage, no micro-batch or no slice.
Schedule empty_schedule(std::string_view name, std::vector<int> rank_of_stage, int micro_batches, int slices = 1);

}  // namespace twobp
