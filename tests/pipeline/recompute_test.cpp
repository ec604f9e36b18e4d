// Tests recomputation in the pipeline. The profile's bytes are those of the meter for every mode, and a block's bytes
// are those counted by hand. The cap keeps its promise although W needs memory of its own.
#include <algorithm>
#include <map>

#include "tests/pipeline/step_bytes.h"
#include "twobp/models/recompute/recompute_layer.h"
#include "twobp/models/recompute/recompute_rules.h"
#include "twobp/plan/cost_model.h"
#include "twobp/plan/memory/stage_bytes.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::fixed_bytes;
using test::kMessage;
using test::kSaved;
using test::kStash;
using test::measured;
using test::measured_peaks;
using test::options_of;
using test::random_batch;
using test::SplitModel;
using test::step_request;
using test::take_gradients;

// Sets the mode of all layers, including the first and the last.
ModelSpec with_mode(ModelSpec model, Recompute mode) {
  recompute(model, std::vector<Recompute>(model.layers.size(), mode));
  return model;
}

// Neighbouring layers have different modes, and each mode occurs twice.
ModelSpec mixed(ModelSpec model) {
  std::vector<Recompute> modes;
  for (size_t i = 0; i < model.layers.size(); ++i) modes.push_back(static_cast<Recompute>(3 - i % 4));
  recompute(model, modes);
  return model;
}

std::vector<SplitModel> cases() {
  std::vector<SplitModel> all;
  for (const std::string& name : recompute_names()) {
    const Recompute mode = parse_recompute(name);
    all.push_back({"mlp on 1, " + name, with_mode(test::small_mlp(4), mode), {4}});
    all.push_back({"mlp on 2, " + name, with_mode(test::small_mlp(4), mode), {1, 3}});
    all.push_back({"llama on 1, " + name, with_mode(test::small_llama(2), mode), {6}});
    all.push_back({"llama on 3, " + name, with_mode(test::small_llama(3), mode), {3, 3, 2}});
  }
  all.push_back({"mixed llama on 1", mixed(test::small_llama(3)), {8}});
  all.push_back({"mixed llama on 2", mixed(test::small_llama(3)), {4, 4}});
  return all;
}

TEST(RecomputeProfile, PeaksAreWhatTheMeterMeasures) {
  for (const SplitModel& c : cases()) {
    Pipeline pipeline = test::measured_pipeline(c);
    for (const char* schedule : {"naive", "gpipe", "1f1b"}) {
      if (c.split.size() > 1 && std::string(schedule) != "naive") continue;  // messages would be in transit
      for (const int micro_batches : {1, 3}) {
        const StepPlan plan = pipeline.plan(schedule, micro_batches, P2Policy::kOff, {P2Batching::kLoop, 0});
        EXPECT_EQ(measured_peaks(pipeline, plan), plan.standard_peaks)
            << c.name << ", " << schedule << ", M " << micro_batches;
      }
    }
  }
}

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
    const ModelSpec model = with_mode(test::small_llama(4), mode);
    Pipeline pipeline(model, measured(model), options_of({10}));
    return measured_peaks(pipeline, pipeline.plan(schedule, 4, policy, {P2Batching::kLoop, 0}))[0];
  };
  const int64_t none = peak(Recompute::kNone, "gpipe", P2Policy::kOff);
  EXPECT_LT(2 * peak(Recompute::kActivations, "gpipe", P2Policy::kOff), none);
  const int64_t none_end = peak(Recompute::kNone, "naive", P2Policy::kEnd);
  EXPECT_LT(3 * peak(Recompute::kDerivatives, "naive", P2Policy::kEnd), 2 * none_end);
  EXPECT_LT(2 * peak(Recompute::kBoth, "gpipe", P2Policy::kEnd), none);
}

// With `auto`, no rank holds more in total than the fullest rank of standard backpropagation with the same
// recomputation.
TEST(RecomputeMemory, AutoCapKeepsItsPromise) {
  for (const SplitModel& c : cases()) {
    Pipeline pipeline = test::measured_pipeline(c);
    for (const char* schedule : {"gpipe", "1f1b"}) {
      for (const int micro_batches : {2, 4, 8}) {
        const StepPlan standard = pipeline.plan(schedule, micro_batches, P2Policy::kOff);
        pipeline.run(standard, random_batch(micro_batches), step_request());
        take_gradients(pipeline);
        const auto fixed = fixed_bytes(pipeline);
        int64_t allowed = 0;
        for (size_t r = 0; r < fixed.size(); ++r) {
          allowed = std::max(allowed, fixed[r] + standard.standard_peaks[r]);
        }
        const int64_t under_way = c.split.size() > 1 ? micro_batches * kMessage : 0;
        for (const P2Policy policy : {P2Policy::kEnd, P2Policy::kFill}) {
          const auto peaks = measured_peaks(pipeline, pipeline.plan(schedule, micro_batches, policy));
          for (size_t r = 0; r < peaks.size(); ++r) {
            EXPECT_LE(peaks[r] + fixed[r], allowed + under_way)
                << c.name << ", " << schedule << ", M " << micro_batches << ", " << policy_name(policy);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
