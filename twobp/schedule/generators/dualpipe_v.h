// DualPipe-V: DeepSeek's DualPipe (arXiv 2412.19437, https://github.com/deepseek-ai/DualPipe) cut in half along its
// symmetry, by Sea AI Lab.
#pragma once

#include "twobp/schedule/schedule.h"

namespace twobp {

// Two stages on each rank, V-shaped: 2N stages on N ranks, M >= 2N. In the middle, every F is followed by a B of the
// rank's other stage. Systems that overlap computation and communication run the two as one. Here they run one after
// the other, so nothing is hidden. B is whole in the middle; at the ends I and W are separate. At most 2N + 1
// micro-batches of stages are in flight. Throws Error for M < 2N.
Schedule dualpipe_v(int stages, int ranks, int micro_batches);

}  // namespace twobp
