// Orders of F and I, written in one of two ways: as phases (ZB-V), or as a pattern that repeats every six units
// (V-Half, V-Min).
#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/schedule/generators/generators.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/passes.h"

namespace twobp {
namespace {

constexpr int kUnits = 6;  // F, I and W of two stages: the work of a rank for a micro-batch

// Makes an order of F and I from a schedule of F and B: B becomes I.
Schedule without_p2(Schedule schedule) {
  for (auto& list : schedule.ranks) {
    for (Instruction& i : list) {
      if (i.op == Op::kBackward) i.op = Op::kBackwardP1;
    }
  }
  return schedule;
}

// The times of a micro-batch's four ops of F and I in the pattern. Each way through the ranks starts `delay` units
// later than it could, and takes `hop` units from rank to rank. The times of micro-batch m are kUnits * m later.
struct VPattern {
  std::array<int, 4> hop{};    // F down, F up, I down, I up
  std::array<int, 3> delay{};  // at the turns: F down to F up, F up to I down, I down to I up
};

// Appends the rank's ops in order of their time in the pattern. A pattern must bring a rank's four ops to four
// different units modulo kUnits; the other two are for W.
void append_pattern(Schedule& schedule, int ranks, int rank, const VPattern& pattern) {
  const auto [f_down, f_up, i_down, i_up] = pattern.hop;
  const int down = rank;
  const int up = ranks - 1 - rank;
  const int turn_f = f_down * (ranks - 1) + 1 + pattern.delay[0];
  const int turn_i = turn_f + f_up * (ranks - 1) + 1 + pattern.delay[1];
  const int turn_back = turn_i + i_down * (ranks - 1) + 1 + pattern.delay[2];
  const int lower = rank;
  const int upper = schedule.stages - 1 - rank;
  append_lanes(schedule, rank, {.period = kUnits},
               {{Op::kForward, lower, 1LL * f_down * down},
                {Op::kForward, upper, turn_f + f_up * up},
                {Op::kBackwardP1, upper, turn_i + i_down * down},
                {Op::kBackwardP1, lower, turn_back + i_up * up}});
}

Schedule v_shaped(std::string_view name, int stages, int ranks, int micro_batches, int slices) {
  return empty_schedule(name, place_stages(Placement::kV, stages, ranks), micro_batches, slices);
}

// Slices are further in flight in both stages of a rank.
Schedule from_pattern(std::string_view name, int stages, int ranks, int micro_batches, int slices, VPattern pattern,
                      int most_in_flight) {
  Schedule schedule = v_shaped(name, stages, ranks, micro_batches, slices);
  pattern.delay[1] += kUnits * (slices - 1);
  most_in_flight += 2 * (slices - 1);
  for (int rank = 0; rank < ranks; ++rank) append_pattern(schedule, ranks, rank, pattern);
  return place_p2(std::move(schedule), most_in_flight);
}

}  // namespace

Schedule zb_h1(int stages, int micro_batches, int slices) {
  return place_p2(without_p2(one_forward_one_backward(stages, micro_batches, slices)), stages + slices - 1);
}

Schedule zb_h2(int stages, int micro_batches, int slices) {
  return place_p2(without_p2(eager_one_forward_one_backward(stages, micro_batches, slices)), 2 * stages + slices - 2);
}

Schedule zb_v(int stages, int ranks, int micro_batches, int slices) {
  Schedule schedule = v_shaped("zb-v", stages, ranks, micro_batches, slices);
  const PhaseStep f0{Op::kForward, 0};
  const PhaseStep f1{Op::kForward, 1};
  const PhaseStep i0{Op::kBackwardP1, 0};
  const PhaseStep i1{Op::kBackwardP1, 1};
  // The phases need a full pipeline. Micro-batches after M are left out.
  const int ahead = slices - 1;  // F of the slices before the one whose I comes first
  const int full = std::max(schedule.micro_batches, 2 * ranks - 1 + ahead);
  for (int rank = 0; rank < ranks; ++rank) {
    const int after = ranks - rank;  // ranks from this one to the bottom of the V
    schedule.ranks[rank].reserve(4 * static_cast<size_t>(schedule.micro_batches));
    append_phases(schedule, rank, {rank, stages - 1 - rank},
                  {{2 * after - 1, {f0}},
                   {rank + ahead, {f1, f0}},
                   {after, {f1, i1}},
                   {full - (2 * ranks - 1 - rank) - ahead, {f0, i0, f1, i1}},
                   {after - 1, {i0, f1, i1}},
                   {rank + ahead, {i0, i1}},
                   {after, {i0}}});
  }
  return place_p2(std::move(schedule), 2 * (ranks + ahead));
}

// The hops are the smallest with lifetimes (from F down to I up, and from F up to I down) that add up to the same sum
// on every rank: 6N units here and 4N below. Divided by the period, these sums are the limits. The delays are the
// smallest that keep a rank's four ops apart modulo the period.
Schedule v_half(int stages, int ranks, int micro_batches, int slices) {
  const VPattern pattern = ranks % 2 == 0 ? VPattern{{1, 2, 1, 2}, {3, 1, 3}} : VPattern{{1, 2, 1, 2}, {0, 0, 1}};
  return from_pattern("v-half", stages, ranks, micro_batches, slices, pattern, (ranks + 2) / 2 * 2);
}

Schedule v_min(int stages, int ranks, int micro_batches, int slices) {
  const VPattern pattern = ranks % 3 == 0 ? VPattern{{1, 1, 1, 1}, {2, 0, 2}} : VPattern{{1, 1, 1, 1}, {0, 0, 0}};
  return from_pattern("v-min", stages, ranks, micro_batches, slices, pattern, (ranks + 4) / 3 * 2);
}

Schedule dualpipe_v(int stages, int ranks, int micro_batches) {
  if (micro_batches < 2 * ranks) return keep_micro_batches(dualpipe_v(stages, ranks, 2 * ranks), micro_batches);
  Schedule schedule = empty_schedule("dualpipe-v", place_stages(Placement::kV, stages, ranks), micro_batches);
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
