// Tests the bytes of recomputation: those of a block are those counted by hand. byte_cap_test has the peaks and the
// cap.
#include <map>

#include "tests/pipeline/step_bytes.h"
#include "twobp/models/recompute/recompute_layer.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::kMessage;
using test::kSaved;
using test::kStash;
using test::measured;
using test::measured_peaks;
using test::options_of;

// This block is in the middle. F holds its output and the tensors that the mode keeps. I replaces the tensors of F with
// those that W needs. The input belongs to the previous block.
TEST(RecomputeProfile, BytesOfABlockAreThoseCountedByHand) {
  struct Bytes {
    int64_t forward_held, stash;
  };
  const std::map<Recompute, Bytes> expected = {{Recompute::kNone, {kSaved + kMessage, kStash}},
                                               {Recompute::kActivations, {kMessage, kStash}},
                                               {Recompute::kDerivatives, {kSaved + kMessage, 2 * kMessage}},
                                               {Recompute::kBoth, {kMessage, 2 * kMessage}}};
  for (const auto& [mode, bytes] : expected) {
    ModelSpec model = test::small_mlp(3);
    recompute(model, {Recompute::kNone, mode, Recompute::kNone});
    const LayerCost cost = layer_costs(model, measured(model))[1];
    EXPECT_EQ(cost.forward_held, bytes.forward_held) << recompute_name(mode);
    EXPECT_EQ(cost.stash, bytes.stash) << recompute_name(mode);
    EXPECT_EQ(cost.p2_units, mode == Recompute::kNone || mode == Recompute::kActivations ? 2 : 1);
  }
}

// A W that recomputes derivatives holds the tensors of F and I meanwhile. The W of a Linear holds none otherwise.
TEST(RecomputeProfile, BackwardP2NeedsMemoryOfItsOwn) {
  for (const Recompute mode : {Recompute::kNone, Recompute::kActivations, Recompute::kDerivatives}) {
    ModelSpec model = test::small_mlp(3);
    recompute(model, {Recompute::kNone, mode, Recompute::kNone});
    const LayerCost cost = layer_costs(model, measured(model))[1];
    if (mode == Recompute::kDerivatives) {
      EXPECT_GE(cost.p2_peak, kStash - 2 * kMessage);
    } else {
      EXPECT_EQ(cost.p2_peak, 0);
    }
  }
}

// Recomputed activations keep only one tensor per layer and micro-batch, so a stage with four micro-batches in flight
// needs less memory. Recomputed derivatives save memory where W waits.
TEST(RecomputeMemory, PeaksFall) {
  const auto peak = [](Recompute mode, const char* schedule, P2Policy policy) {
    const ModelSpec model = test::with_mode(test::small_llama(4), mode);
    Pipeline pipeline(model, measured(model), options_of({10}));
    return measured_peaks(pipeline, pipeline.plan(schedule, 4, policy, {P2Batching::kLoop, 0}))[0];
  };
  const int64_t none = peak(Recompute::kNone, "gpipe", P2Policy::kOff);
  EXPECT_LT(2 * peak(Recompute::kActivations, "gpipe", P2Policy::kOff), none);
  const int64_t none_end = peak(Recompute::kNone, "naive", P2Policy::kEnd);
  EXPECT_LT(3 * peak(Recompute::kDerivatives, "naive", P2Policy::kEnd), 2 * none_end);
  EXPECT_LT(2 * peak(Recompute::kBoth, "gpipe", P2Policy::kEnd), none);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
