// Cuts sequences into slices as the configuration asks, and measures them.
#pragma once

#include <functional>

#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/pipeline_config.h"
#include "twobp/pipeline/profile/slices.h"
#include "twobp/train/variant.h"
#include "twobp/transport/transport.h"

namespace twobp {

// The slices that pipeline.slices and pipeline.slice_lengths ask for, measured on `batch`, of whole sequences. Without
// slice_lengths, the fastest cuts by pipeline.slice_cost; without `step` either, slices that cost the same. By
// operations, which are counted, cuts are the same in all runs. Without slices, the profile of whole sequences. Throws
// Error if the sequences are too short, or the lengths
// do not add up to one. Measures for about `seconds`, once or twice.
SliceProfiles measured_slices(const ModelSpec& model, const ProfiledBatch& batch, const PipelineConfig& config,
                              const Device& device, double seconds = 0.3, const StepSeconds& step = {});

// The seconds of a step of this schedule as simulated, without what lies outside F, I and W.
double simulated_seconds(const ModelSpec& model, const SliceProfiles& slices, const PipelineOptions& options,
                         const Variant& variant, int micro_batches);

// The result of `measure` on the first process, for all, because all processes must split and plan alike.
SliceProfiles agreed_slices(Transport& processes, const ModelSpec& model, int slices,
                            const std::function<SliceProfiles()>& measure, double timeout);

}  // namespace twobp
