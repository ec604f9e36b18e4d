// The table of named schedules, and the functions that make them ready to run.
#include "twobp/schedule/named_schedules.h"

#include <algorithm>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/schedule/check/validate.h"
#include "twobp/schedule/generators/generators.h"
#include "twobp/schedule/passes.h"

namespace twobp {
namespace {

bool is_small_enough(int64_t stages, int64_t micro_batches, int64_t slices) {
  return stages * micro_batches <= kMostSlots && stages * micro_batches * slices <= kMostSlots;
}

}  // namespace

const std::vector<NamedSchedule>& named_schedules() {
  const auto naive_of = [](int stages, int, int m, int k) { return naive(stages, m, k); };
  const auto gpipe_of = [](int stages, int, int m, int k) { return gpipe(stages, m, k); };
  const auto one_f_one_b = [](int stages, int, int m, int k) { return one_forward_one_backward(stages, m, k); };
  const auto eager_of = [](int stages, int, int m, int k) { return eager_one_forward_one_backward(stages, m, k); };
  static const std::vector<NamedSchedule> kNamed = {
      {.name = "naive", .what = "one micro-batch after the other", .generate = naive_of, .micro_batches_per_rank = 0},
      {.name = "gpipe", .what = "all F, then all B", .generate = gpipe_of},
      {.name = "1f1b", .what = "one F, one B", .generate = one_f_one_b},
      {.name = "1f1b-1", .what = "1f1b, M = N by default", .generate = one_f_one_b},
      {.name = "1f1b-2", .what = "1f1b, M = 2N by default", .generate = one_f_one_b, .micro_batches_per_rank = 2},
      {.name = "eager-1f1b",
       .what = "1f1b with more F at first, as many as fit before the first gradient",
       .generate = eager_of,
       .micro_batches_per_rank = 2},
      {.name = "interleaved-1f1b",
       .what = "1f1b with several stages a rank, depth first",
       .generate = interleaved_one_forward_one_backward,
       .placement = Placement::kLooped,
       .micro_batches_per_rank = 2},
      {.name = "looped-bfs",
       .what = "several stages a rank, breadth first",
       .generate = looped_bfs,
       .placement = Placement::kLooped},
      {.name = "zb-h1",
       .what = "1f1b with W in the waits, at 1f1b's memory",
       .generate = [](int stages, int, int m, int k) { return zb_h1(stages, m, k); },
       .places_p2 = true,
       .micro_batches_per_rank = 2},
      {.name = "zb-h2",
       .what = "zero bubble, at almost twice 1f1b's memory",
       .generate = [](int stages, int, int m, int k) { return zb_h2(stages, m, k); },
       .places_p2 = true,
       .micro_batches_per_rank = 2},
      {.name = "interleaved-zb",
       .what = "interleaved 1f1b with W in the waits",
       .generate = interleaved_zero_bubble,
       .placement = Placement::kLooped,
       .places_p2 = true,
       .micro_batches_per_rank = 2},
      {.name = "zb-v",
       .what = "zero bubble on a V of two stages a rank, at 1f1b's memory",
       .generate = zb_v,
       .placement = Placement::kV,
       .places_p2 = true,
       .micro_batches_per_rank = 2},
      {.name = "v-half",
       .what = "V of two stages a rank, at half of 1f1b's memory",
       .generate = v_half,
       .placement = Placement::kV,
       .places_p2 = true,
       .micro_batches_per_rank = 2},
      {.name = "v-min",
       .what = "V of two stages a rank, at a third of 1f1b's memory",
       .generate = v_min,
       .placement = Placement::kV,
       .places_p2 = true,
       .micro_batches_per_rank = 2},
      {.name = "dualpipe-v",
       .what = "V of two stages a rank, F and B in pairs",
       .generate = [](int stages, int ranks, int m, int) { return dualpipe_v(stages, ranks, m); },
       .placement = Placement::kV,
       .places_p2 = true,
       .micro_batches_per_rank = 2,
       .takes_slices = false},
  };
  return kNamed;
}

std::vector<std::string> schedule_names() {
  std::vector<std::string> names;
  for (const auto& entry : named_schedules()) names.emplace_back(entry.name);
  return names;
}

const NamedSchedule& named_schedule(std::string_view name) {
  return named_schedules()[index_of_name("schedule", name, schedule_names())];
}

int default_ranks(std::string_view name, int stages) {
  const int per_rank = usual_stages_per_rank(named_schedule(name).placement);
  TWOBP_CHECK(stages >= 1, "schedule '", name, "' needs at least 1 stage, got ", stages);
  TWOBP_CHECK(stages % per_rank == 0, "schedule '", name, "' places ", per_rank, " stages on each rank, and ", stages,
              " stages do not divide: use a multiple of ", per_rank);
  return stages / per_rank;
}

int default_micro_batches(std::string_view name, int stages, int ranks) {
  if (ranks == 0) ranks = default_ranks(name, stages);
  return std::max(1, named_schedule(name).micro_batches_per_rank * ranks);
}

std::vector<P2Policy> policies_of(std::string_view name) {
  std::vector<P2Policy> policies = {P2Policy::kOff, P2Policy::kEnd, P2Policy::kCooldown, P2Policy::kFill};
  if (named_schedule(name).places_p2) policies.push_back(P2Policy::kPlaced);
  return policies;
}

bool admits(std::string_view name, int stages, int ranks, int micro_batches, int slices) {
  const NamedSchedule& entry = named_schedule(name);
  return micro_batches >= 1 && slices >= 1 && (slices == 1 || entry.takes_slices) &&
         is_small_enough(stages, micro_batches, slices) && placement_fits(entry.placement, stages, ranks);
}

std::vector<NamedVariant> named_schedules_on(const std::vector<int>& rank_of_stage, int micro_batches, int slices) {
  const int stages = static_cast<int>(rank_of_stage.size());
  int ranks = 0;
  for (const int rank : rank_of_stage) ranks = std::max(ranks, rank + 1);
  std::vector<NamedVariant> found;
  for (const NamedSchedule& entry : named_schedules()) {
    if (!admits(entry.name, stages, ranks, micro_batches, slices)) continue;
    if (place_stages(entry.placement, stages, ranks) != rank_of_stage) continue;
    for (const P2Policy policy : policies_of(entry.name)) found.push_back({entry.name, policy});
  }
  return found;
}

void check_size(int stages, int micro_batches, int slices) {
  if (slices == 1) {
    TWOBP_CHECK(is_small_enough(stages, micro_batches, 1), "a schedule of ", stages, " stages and ", micro_batches,
                " micro-batches is too large: stages x micro-batches may be ", kMostSlots, " at most");
  }
  TWOBP_CHECK(is_small_enough(stages, micro_batches, slices), "a schedule of ", stages, " stages, ", micro_batches,
              " micro-batches and ", slices, " slices is too large: stages x micro-batches x slices may be ",
              kMostSlots, " at most");
}

Schedule make_schedule(std::string_view name, int stages, int micro_batches, P2Policy policy, int ranks, int slices) {
  if (ranks == 0) ranks = default_ranks(name, stages);
  const NamedSchedule& entry = named_schedule(name);
  place_stages(entry.placement, stages, ranks);  // throws unless they divide as the placement requires
  TWOBP_CHECK(slices >= 1, "schedule '", name, "' needs at least 1 slice, got ", slices);
  TWOBP_CHECK(slices == 1 || entry.takes_slices, "schedule '", name, "' has no form with slices, got ", slices,
              ": use another schedule, or 1 slice");
  check_size(stages, micro_batches, slices);
  Schedule schedule = entry.generate(stages, ranks, micro_batches, slices);
  schedule.name = name;
  // Few micro-batches may leave a schedule that places W only whole B.
  const bool as_generated = entry.places_p2 && policy == P2Policy::kPlaced;
  schedule.policy = policy;
  schedule = add_communication(as_generated ? schedule : apply_p2_policy(std::move(schedule), policy));
  validate(schedule);
  return schedule;
}

Schedule make_forward_schedule(const std::vector<int>& rank_of_stage, int micro_batches) {
  check_size(static_cast<int>(rank_of_stage.size()), micro_batches);
  Schedule schedule = add_communication(forward_only(rank_of_stage, micro_batches));
  validate(schedule);
  return schedule;
}

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
