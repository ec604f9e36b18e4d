// In which order a rank runs the W that is left after its last I. Any order leaves the same bits.
#pragma once

#include <cstdint>

namespace twobp {

enum class P2Order : uint8_t {
  kOldest,  // as queued: a micro-batch after the other
  kBucket,  // layer by layer, the last first, all its micro-batches: gradients are complete one layer after
            // the other, and their sums over data-parallel replicas run beside the W of the other layers. The
            // first stage, whose dL/dx nobody waits for, does so within its last I. In waits before, with
            // replicas, W of a stage that has no more I comes first.
};

}  // namespace twobp
