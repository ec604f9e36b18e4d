// With F and B of one unit, a copy that starts a micro-batch every second unit leaves every second unit of
// each rank free, and since N is even those are the ones in which the other copy's come by. N / 2
// micro-batches of each fill a rank for 2N units, after which the next can follow.
#include "twobp/schedule/generators/chimera.h"

#include "twobp/core/check.h"
#include "twobp/schedule/generators/classic.h"
#include "twobp/schedule/generators/lanes.h"
#include "twobp/schedule/placement.h"

namespace twobp {

Schedule chimera(int stages, int ranks, int micro_batches) {
  TWOBP_CHECK(ranks % 2 == 0, "schedule 'chimera' needs an even number of ranks, got ", ranks);
  TWOBP_CHECK(
      micro_batches >= 2 && micro_batches % 2 == 0,
      "schedule 'chimera' needs an even number of micro-batches, half for each copy of the model, got ",
      micro_batches);
  // The way up from N is the way back of a V.
  Schedule schedule =
      empty_schedule("chimera", place_stages(Placement::kV, stages, ranks), micro_batches / 2);
  schedule.replicas = 2;
  const Rhythm rhythm{2 * ranks, ranks / 2, 2};
  for (int rank = 0; rank < ranks; ++rank) {
    const int down = rank;  // of the ranks before it, for each copy
    const int up = ranks - 1 - rank;
    append_lanes(schedule, rank, rhythm,
                 {{Op::kForward, rank, down},
                  {Op::kForward, ranks + up, up},
                  {Op::kBackward, rank, 2 * ranks - 1 - down},
                  {Op::kBackward, ranks + up, 2 * ranks - 1 - up}});
  }
  return schedule;
}

}  // namespace twobp
