#include <algorithm>

#include "twobp/core/check.h"
#include "twobp/schedule/named_schedules.h"

namespace twobp {

std::string_view placement_name(Placement placement) {
  return placement == Placement::kLinear ? "linear" : placement == Placement::kLooped ? "looped" : "v";
}

int usual_stages_per_rank(Placement placement) {
  return placement == Placement::kLinear ? 1 : 2;
}

bool placement_fits(Placement placement, int stages, int ranks) {
  if (stages < 1 || ranks < 1) return false;
  return placement == Placement::kLooped
             ? stages % ranks == 0
             : stages / usual_stages_per_rank(placement) == ranks && stages % usual_stages_per_rank(placement) == 0;
}

std::vector<int> place_stages(Placement placement, int stages, int ranks) {
  TWOBP_CHECK(stages >= 1 && ranks >= 1, "a pipeline needs at least 1 stage and 1 rank, got ", stages, " and ", ranks);
  TWOBP_CHECK(placement_fits(placement, stages, ranks), stages, " stages on ", ranks, " ranks: a ",
              placement_name(placement), " placement has ",
              placement == Placement::kLinear ? "one stage"
              : placement == Placement::kV    ? "two stages"
                                              : "the same number of stages",
              " on each rank");
  std::vector<int> rank_of_stage(stages);
  for (int s = 0; s < stages; ++s) {
    rank_of_stage[s] = placement == Placement::kV ? std::min(s, stages - 1 - s) : s % ranks;
  }
  return rank_of_stage;
}

}  // namespace twobp
