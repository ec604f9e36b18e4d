// Named schedules, for any number of stages N >= 1 and micro-batches M >= 1 (M < N and M not a multiple of N
// included). A generator writes F and B only; passes.h does the rest.
#pragma once

#include <string_view>
#include <vector>

#include "twobp/schedule/schedule.h"

namespace twobp {

// One micro-batch after the other goes through all stages and back.
Schedule naive(int stages, int micro_batches);
// All F, then all B, each in micro-batch order.
Schedule gpipe(int stages, int micro_batches);
// One forward, one backward: stage s runs min(N - s, M) F, then alternates B and F, then the rest of B.
Schedule one_forward_one_backward(int stages, int micro_batches);
// F only: evaluation.
Schedule forward_only(int stages, int micro_batches);

// The names `make_schedule` takes: naive, gpipe, 1f1b, and the paper's presets 1f1b-1 (M = N) and 1f1b-2
// (M = 2N), which are 1f1b with a default M (arXiv 2405.18047, section 3).
std::vector<std::string> schedule_names();
// The number of micro-batches a schedule has unless it is told: 1 for naive, N for gpipe, 1f1b and 1f1b-1,
// 2N for 1f1b-2.
int default_micro_batches(std::string_view name, int stages);

// The schedule of that name, ready to run: generator, p2 policy, sends and receives, validated.
// Throws Error for an unknown name (naming the nearest), N < 1 or M < 1.
Schedule make_schedule(std::string_view name, int stages, int micro_batches, P2Policy policy);
// forward_only, ready to run.
Schedule make_forward_schedule(int stages, int micro_batches);

}  // namespace twobp
