// `pipeline.schedule: "auto"`: the schedule that the auto-scheduler (plan/auto_schedule/auto_schedule.h) finds for the
// profile and the byte cap.
#pragma once

#include <vector>

#include "twobp/train/variant.h"

namespace twobp {

// The schedule found for this pipeline, with its p2 policy. Batching and cap are those of `asked`. The name says how
// the schedule was found, its predicted gain over the best named schedule under the same cap, and a bound on its
// distance from the optimum. The automatic cap is that of 1f1b or, with several stages per rank, of zb-v or looped-bfs.
// It holds in the search and in every step after it (Variant::standard_peaks). Throws Error if no schedule fits the
// cap. `batch` as for profiled_costs.
Variant auto_variant(const Pipeline& pipeline, int micro_batches, Variant asked, const std::vector<double>& batch = {});

}  // namespace twobp
