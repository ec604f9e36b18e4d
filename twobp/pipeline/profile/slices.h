// Where sequences are cut into slices (Schedule::slices), and what each slice costs.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "twobp/pipeline/pipeline_config.h"
#include "twobp/pipeline/profile/profile.h"

namespace twobp {

class Transport;

// Cuts fall on multiples of this many positions, unless a shorter sequence than the measured one is cut.
inline constexpr int64_t kSliceBlock = 8;

// The slices of a sequence: where each begins, and the end of the last. Empty: sequences are not cut.
using Cuts = std::vector<int64_t>;

struct SliceProfiles {
  Cuts cuts;
  std::vector<Profile> profiles;  // of each slice
  int count() const { return cuts.empty() ? 1 : static_cast<int>(cuts.size()) - 1; }
  std::vector<int> lengths() const;  // positions of each slice; empty: sequences are not cut
};

// The positions of the sequences of a micro-batch. Throws Error if it has none.
int64_t sequence_length(const Fields& fields);

// `slices` slices of about equal length. Throws Error if there are fewer blocks than slices.
Cuts equal_cuts(int64_t positions, int slices);

// The same cuts, in proportion, of sequences of another length. Throws Error if there are fewer positions than slices.
Cuts scaled_cuts(const Cuts& cuts, int64_t positions);

// Cuts that make each slice of these profiles cost `growth` times as much as the previous one, if the cost of a
// position grows linearly along the sequence, as it does in causal attention. The measured cuts, if nothing costs
// anything.
Cuts growing_cuts(const ModelSpec& model, const SliceProfiles& measured, double growth);

// Estimates the slices at other cuts from the measured ones: seconds and units of W, without bytes. (Seconds or
// operations, here and below.)
SliceProfiles expected_slices(const SliceProfiles& measured, const Cuts& cuts);

// The seconds of a step with these slices.
using StepSeconds = std::function<double(const SliceProfiles& slices)>;

// The cuts with the shortest expected step, given slices of equal length. Unequal slices cost the same, or the same
// factor more or less than the previous one, which helps where stages cost unequally. Equal lengths stay unless others
// gain 2 %.
Cuts fastest_cuts(const ModelSpec& model, const SliceProfiles& equal_lengths, const StepSeconds& step);

// As measure_profile, slice by slice: `batch` has whole sequences. F runs the slices first to last, I and W last to
// first.
SliceProfiles measure_slices(const ModelSpec& model, const ProfiledBatch& batch, const Cuts& cuts, double seconds = 0.3,
                             const Device& device = {});

// The same with the additions and multiplications of products and attention (FLOPs) in place of seconds. They are
// counted in one pass on one thread, and are equal in all runs.
SliceProfiles count_operations_of_slices(const ModelSpec& model, const ProfiledBatch& batch, const Cuts& cuts,
                                         const Device& device = {});

// The profile of whole micro-batches: seconds and bytes of all slices. A peak is that of the highest slice.
Profile sum_of(const SliceProfiles& slices);

// The slices that pipeline.slices and pipeline.slice_lengths ask for, measured on `batch`, of whole sequences. Without
// slice_lengths, the cuts that are fastest by operations, which are the same in all runs; without `step`, slices that
// cost the same. Without slices, the profile of whole sequences. Throws Error if the sequences are too short, or the
// lengths do not add up to one. Measures for about `seconds`.
SliceProfiles measured_slices(const ModelSpec& model, const ProfiledBatch& batch, const PipelineConfig& config,
                              const Device& device, double seconds = 0.3, const StepSeconds& step = {});

// The result of `measure` on the first process, for all, because all processes must split and plan alike.
SliceProfiles agreed_slices(Transport& processes, const ModelSpec& model, int slices,
                            const std::function<SliceProfiles()>& measure, double timeout);

}  // namespace twobp
