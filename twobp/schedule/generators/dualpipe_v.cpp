// The phases as published; N - 1 - r is the number of ranks between rank r and the bottom of the V.
#include "twobp/schedule/generators/dualpipe_v.h"

#include "twobp/core/check.h"
#include "twobp/schedule/generators/classic.h"
#include "twobp/schedule/generators/phases.h"
#include "twobp/schedule/named_schedules.h"

namespace twobp {

Schedule dualpipe_v(int stages, int ranks, int micro_batches) {
  Schedule schedule = empty_schedule("dualpipe-v", place_stages(Placement::kV, stages, ranks), micro_batches);
  TWOBP_CHECK(micro_batches >= 2 * ranks, "schedule 'dualpipe-v' on ", ranks, " ranks needs at least ", 2 * ranks,
              " micro-batches (two for each rank), got ", micro_batches,
              ": use more, or 'zb-v', which takes any number");
  const PhaseStep f0{Op::kForward, 0};
  const PhaseStep f1{Op::kForward, 1};
  const PhaseStep b0{Op::kBackward, 0};
  const PhaseStep b1{Op::kBackward, 1};
  const PhaseStep i0{Op::kBackwardP1, 0};
  const PhaseStep i1{Op::kBackwardP1, 1};
  const PhaseStep w{Op::kBackwardP2, kOldest};
  for (int rank = 0; rank < ranks; ++rank) {
    const int below = ranks - 1 - rank;
    const bool odd = rank % 2 == 1;
    // The last rank + 1 pairs of B. The first half are whole B; the second half are I, so that dL/dx leaves sooner. An
    // even rank's middle pair is one of each.
    const int whole = (rank + 1) / 2;
    schedule.ranks[rank].reserve(6 * static_cast<size_t>(micro_batches));
    append_phases(schedule, rank, {rank, stages - 1 - rank},
                  {{2 * below, {f0}},
                   {rank + 1, {f0, f1}},
                   {below, {i1, w, f1}},
                   {micro_batches - 2 * ranks + rank + 1, {f0, b1, f1, b0}},
                   {below, {b1, f1, b0}},
                   {whole, {b1, b0}},
                   {odd ? 0 : 1, {b1, i0}},
                   {odd ? whole : rank - whole, {i1, i0}},
                   {below, {w, i0}},
                   {rank + 1, {w}}});
  }
  return schedule;
}

}  // namespace twobp
