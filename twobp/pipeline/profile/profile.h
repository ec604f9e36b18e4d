// Measured costs of one micro-batch in each kind of layer: seconds of F, I and W, and bytes. They give the split into
// stages, the byte cap, and the growth that the executor makes room for.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "twobp/core/measure.h"
#include "twobp/data/data.h"
#include "twobp/models/model.h"
#include "twobp/nn/context.h"
#include "twobp/nn/device/device.h"
#include "twobp/pipeline/observer.h"
#include "twobp/schedule/simulate/stage_cost.h"
#include "twobp/transport/transport.h"

namespace twobp {

// The costs of each kind of layer, by LayerSpec::kind.
using Profile = std::map<std::string, LayerCost>;

// The costs of the layers of each stage.
using StagesOfLayers = std::vector<std::vector<LayerCost>>;

// A micro-batch to measure.
struct ProfiledBatch {
  Fields fields;
  double cost = 1;  // of its samples, over the mean of all (Dataset::cost)
  // A second one, of samples that cost more. It gives LayerCost::forward_rise. Empty: all cost the same.
  Fields costly{};
  double costly_cost = 1;

  ProfiledBatch(Fields all) : fields(std::move(all)) {}  // NOLINT(google-explicit-constructor)
};

// Runs a short chain of layers with each kind, in model order, on the calling thread and its compute threads: once to
// warm up, then until `seconds` have passed, at least 3 and at most 25 times. On a device, each op runs in the compute
// stream, and its time includes the wait for its end. The bytes are those of `batch.fields`; the seconds are those at
// the mean cost.
Profile measure_profile(const ModelSpec& model, const ProfiledBatch& batch, double seconds = 0.3,
                        const Device& device = {});

// The bytes alone, in less time: each layer runs twice.
Profile measure_bytes(const ModelSpec& model, const Fields& batch, const Device& device);

// Bytes of the gradients of a layer with these units of W: of all, of experts that replicas share, of weights with
// these names (see tied_weights), and the most of the others at once if each is applied when it is complete. Those that
// are made in I, and those of layers whose W reads other weights, wait for the whole layer.
struct GradientBytes {
  double all = 0;
  double experts = 0;
  double tied = 0;
  double streamed = 0;
  int unit = 0;  // during which they are that much
};
GradientBytes gradient_bytes(const std::vector<Parameter*>& parameters, const std::vector<P2Unit>& units,
                             const std::set<std::string>& tied);

// The costs of all layers in model order.
std::vector<LayerCost> layer_costs(const ModelSpec& model, const Profile& profile);

// A profile as a message. One process measures it for all.

// One row of numbers for each kind of layer, in the order of their names.
at::Tensor pack_profile(const Profile& profile);
// Unpacks into a profile of the same kinds. Throws Error if their number differs.
void unpack_profile(const at::Tensor& packed, Profile& profile);

// The costs of stages for the simulation, from measured layers.

// The costs of each stage, from Pipeline::layer_costs(), without optimizer and fixed bytes, which a profile does not
// have. `batch`: what the samples of each micro-batch cost, over the mean of all samples; the costs are then rows for
// each micro-batch. Empty: all cost the same.
std::vector<StageCost> profiled_costs(const std::vector<std::vector<LayerCost>>& stages,
                                      const std::vector<double>& batch = {});

// The same, with the seconds of F, I, W and optimizer that a real step took. Those of its micro-batches and slices are
// divided as in the profile.
std::vector<StageCost> measured_costs(const std::vector<std::vector<LayerCost>>& stages,
                                      const std::vector<int>& rank_of_stage, const StepReport& report,
                                      const std::vector<double>& batch = {});

// The samples on which a profile measures.

// A micro-batch of `size` samples with costs near the mean, at most data.size(). If samples cost unequally, also one of
// as many copies of the costliest sample: no micro-batch costs more.
ProfiledBatch profiled_batch(const Dataset& data, int64_t size);

// Measures links between ranks by ping-pong: their cost, and the difference of the clocks at their ends.

// Sends float tensors back and forth between the calling thread, which is rank 0, and a new thread for rank
// 1. Takes about `seconds` in total and returns medians. The transports must not be used otherwise. Throws what their
// waits throw.
LinkSpeed measure_link(Transport& rank0, Transport& rank1, double seconds = 0.2);

// The difference between the monotonic clocks of two processes. On another machine the clock began at another time.

// Rank 0 and `peer` of `transport` call this at the same time. Rank 0 gets the seconds by which the peer's
// now_seconds() is ahead of its own. The error is at most half the round trip of a message (the shortest of a few). The
// peer gets 0. Throws what waits throw.
double clock_ahead(Transport& transport, int peer, double timeout);

}  // namespace twobp
