// DualPipe-V: DeepSeek's DualPipe (arXiv 2412.19437, https://github.com/deepseek-ai/DualPipe) cut in half
// along its symmetry, by Sea AI Lab.
#pragma once

#include "twobp/schedule/schedule.h"

namespace twobp {

// Two stages a rank, V-shaped: 2N stages on N ranks, M >= 2N. In the middle every F is followed by a B of the
// rank's other stage; where computation and communication can overlap, the two are run as one. Here they run
// one after the other, so what the overlap would hide is not hidden. B is whole in the middle, I and W apart
// at the ends. At most 2N + 1 stages' micro-batches are in flight. Throws Error for M < 2N.
Schedule dualpipe_v(int stages, int ranks, int micro_batches);

}  // namespace twobp
