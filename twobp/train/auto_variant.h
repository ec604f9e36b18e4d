// `pipeline.schedule: "auto"`: the schedule that the auto-scheduler (plan/auto_schedule/auto_schedule.h)
// finds for what the profile measured and for the byte cap.
#pragma once

#include "twobp/train/variant.h"

namespace twobp {

// What pipeline.schedule says for it.

// The schedule found for this pipeline, with the p2 policy that goes with it; batching and cap as asked for.
// The name says how it was found, what it is predicted to gain over the best named schedule under the same
// cap, and how far from the best possible it is at most. The automatic cap is that of 1f1b, or of zb-v or
// looped-bfs for several stages a rank, in the search and in every step after it (Variant::standard_peaks).
// Throws Error for a cap that no schedule fits.
Variant auto_variant(const Pipeline& pipeline, int micro_batches, Variant asked);

}  // namespace twobp
