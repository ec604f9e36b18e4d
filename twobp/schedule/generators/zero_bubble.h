// The schedules that place W themselves. Each is an order of F and I and a limit of micro-batches in flight, from which
// place_p2 makes F, I and W. For any N >= 1 and M >= 1. Figures assume F, I and W of one unit each, and hold for M >=
// 2N - 1 (zb_h1: M >= N). The bubble is 1 - M(F + I + W) / (longest span of a rank from its first instruction to its
// last), as the authors measure it.
//
// With `slices` k (classic.h), k - 1 more micro-batches of each stage are in flight.
//
// Sources: ZB-H1, ZB-H2, ZB-V: arXiv 2401.10241; V-Half, V-Min: arXiv 2405.15362.
#pragma once

#include "twobp/schedule/schedule.h"

namespace twobp {

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

}  // namespace twobp
