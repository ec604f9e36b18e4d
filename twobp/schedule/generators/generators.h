// Internal to this folder and named_schedules.cpp: the schedules with names, each a function.
#pragma once

#include <array>
#include <string_view>
#include <vector>

#include "twobp/schedule/schedule.h"

namespace twobp {

// The schedules of the paper (arXiv 2405.18047, section 3), with one stage on each rank, for any number of stages N >=
// 1 and micro-batches M >= 1 (including M < N, and M that is not a multiple of N). They write F and B only; passes.h
// does the rest.
//
// With `slices` k, every micro-batch is cut into k slices (Schedule::slices), and a schedule is that of k M
// micro-batches whose F are k - 1 further ahead of their B, because the last slice's B comes first.

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

// Schedules on a looped placement: stage s on rank s mod N. Each rank has v = stages / N of them ("model chunks"). For
// any N, v and M >= 1. With `slices`, see above; a round has whole micro-batches.

// The micro-batches go in max(1, M / N) rounds, as even as possible (the first ones are larger). Each round goes
// through all chunks of a rank before the next one: depth first. A rank first runs F of one round for each chunk but
// the last, and two more F for each rank after it. Then it alternates one F and one B. If M is a multiple of N, the
// bubble is (N - 1) / v times a rank's time for one micro-batch over all its chunks; that of 1F1B is N - 1 times (arXiv
// 2104.04473, section 2.2).
Schedule interleaved_one_forward_one_backward(int stages, int ranks, int micro_batches, int slices = 1);

// The same, with W placed by itself and only one more F for each rank after it. Every rank has at most as many
// micro-batches of stages in flight as the first rank has after these F: vN if M is a multiple of N. With v = 1 it is
// ZB-H1.
Schedule interleaved_zero_bubble(int stages, int ranks, int micro_batches, int slices = 1);

// Breadth first: all micro-batches go through a chunk before the next chunk, then all B, last chunk first (arXiv
// 2211.05953). B runs in micro-batch order, so the gradients equal those of the other schedules to the bit.
Schedule looped_bfs(int stages, int ranks, int micro_batches, int slices = 1);

// The schedules that place W themselves. Each is an order of F and I and a limit of micro-batches in flight, from which
// place_p2 makes F, I and W. For any N >= 1 and M >= 1. Figures assume F, I and W of one unit each, and hold for M >=
// 2N - 1 (zb_h1: M >= N). The bubble is 1 - M(F + I + W) / (longest span of a rank from its first instruction to its
// last), as the authors measure it.
//
// With `slices` k (above), k - 1 more micro-batches of each stage are in flight.
//
// Sources: ZB-H1, ZB-H2, ZB-V: arXiv 2401.10241; V-Half, V-Min: arXiv 2405.15362.

// One stage on each rank, 1F1B's order and memory: N micro-batches in flight, N - 1 units of idle time in a span.
Schedule zb_h1(int stages, int micro_batches, int slices = 1);
// One stage on each rank, eager 1F1B's order: no idle time in a span, 2N - 1 micro-batches in flight.
Schedule zb_h2(int stages, int micro_batches, int slices = 1);

// Two stages on each rank, V-shaped: 2N stages on N ranks. A rank's in-flight count covers both its stages, so two
// counts are one micro-batch's worth.

// No idle time in a span at 1F1B's memory: 2N in flight, N micro-batches' worth.
Schedule zb_v(int stages, int ranks, int micro_batches, int slices = 1);
// floor((N + 2) / 2) micro-batches' worth in flight, about 3N units (of half a rank's F) of idle time.
Schedule v_half(int stages, int ranks, int micro_batches, int slices = 1);
// floor((N + 4) / 3) micro-batches' worth in flight, about 4N such units of idle time.
Schedule v_min(int stages, int ranks, int micro_batches, int slices = 1);

// DualPipe-V: DeepSeek's DualPipe (arXiv 2412.19437, https://github.com/deepseek-ai/DualPipe) cut in half along its
// symmetry, by Sea AI Lab.
// Two stages on each rank, V-shaped: 2N stages on N ranks. In the middle, every F is followed by a B of the
// rank's other stage. Systems that overlap computation and communication run the two as one. Here they run one after
// the other, so nothing is hidden. B is whole in the middle; at the ends I and W are separate. At most 2N + 1
// micro-batches of stages are in flight. For M < 2N, it is that of 2N without the cells of the others.
Schedule dualpipe_v(int stages, int ranks, int micro_batches);

// The common mechanism of the zero-bubble schedules: given the order of F and I on each rank, it places W where the
// rank would wait.
// Runs a schedule of F and I (in micro-batch order within each stage). F, I and W take one unit each, and messages take
// no time. A rank runs its next F or I as soon as its input has arrived. Until then, and before an F that would bring
// it above `most_in_flight`, it runs its oldest pending W. The rest of W runs at the end. No W runs before it must, so
// within the limit no F or I of this order could run earlier.
//
// A micro-batch of a stage counts as in flight from its F to the end of its W, over all stages of the rank. An F that
// has no room although no W is pending runs anyway, because the order asks for it.
//
// The simulation's `fill` under a cap does the same at these costs (the test compares them). This is separate code
// because whole ticks and counts are several times faster than seconds and bytes, and a search runs generators by the
// thousand. Time is linear in the instructions. Throws Error if the order can never run to its end.
Schedule place_p2(Schedule schedule, int most_in_flight);

// Internal to the generators: a rank's instructions in the order of a timetable.
// The time of micro-batch m: bursts of `burst` micro-batches begin every `period` units. Within a burst they are
// `apart` units apart.
struct Rhythm {
  int period = 1;
  int burst = 1;
  int apart = 0;

  long long time(int m) const {
    return static_cast<long long>(m / burst) * period + static_cast<long long>(m % burst) * apart;
  }
};

// `op` of all micro-batches of a stage. The first is at `begin`, the others follow in the rhythm.
struct Lane {
  Op op = Op::kForward;
  int stage = 0;
  long long begin = 0;
};

// Appends all lanes to the rank's list in order of time (at equal times in the order given).
void append_lanes(Schedule& schedule, int rank, const Rhythm& rhythm, const std::vector<Lane>& lanes);

// Internal to the generators: a rank's instructions as phases. Each phase is a short sequence that is repeated.
// An op on the next micro-batch of one of the rank's two stages, the lower one (0) or the upper one (1). With kOldest
// as the chunk of a W: the pending W of either stage whose I is the oldest, if any is pending.
struct PhaseStep {
  Op op = Op::kForward;
  int chunk = 0;
};
inline constexpr int kOldest = -1;  // as the chunk of a W

struct Phase {
  int times = 0;  // 0 or less: none
  std::vector<PhaseStep> steps;
};

// Appends the phases to the list of a rank that has these two stages. Every stage takes its micro-batches in order.
// Steps after the last micro-batch are left out, so phases may be written for more micro-batches than exist.
void append_phases(Schedule& schedule, int rank, std::array<int, 2> stages, const std::vector<Phase>& phases);

}  // namespace twobp
