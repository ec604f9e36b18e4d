// The order in which a rank runs the W that is left after its last I. Any order leaves the same bits.
#pragma once

#include <cstdint>

namespace twobp {

enum class P2Order : uint8_t {
  kOldest,  // as queued: one micro-batch after another
  kBucket,  // layer by layer, the last first, each for all its micro-batches. Gradients are thus complete one
            // layer after another, and their sums over data-parallel replicas run next to the W of other
            // layers. The first stage, whose dL/dx no rank needs, does so within its last I. With
            // replicas, earlier waits prefer W of a stage that has no more I.
};

}  // namespace twobp
