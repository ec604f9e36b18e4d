// Measured costs of one micro-batch in each kind of layer: seconds of F, I and W, and bytes. They give the
// split into stages, the byte cap, and the growth that the executor makes room for.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "twobp/models/model.h"
#include "twobp/nn/context.h"
#include "twobp/nn/device/device.h"

namespace twobp {

struct LayerProfile {
  double forward = 0;  // seconds per micro-batch, medians
  double backward_p1 = 0;
  double backward_p2 = 0;
  int p2_units = 0;
  // Bytes of activations, relative to the bytes held when the op began (including its input):
  int64_t forward_peak = 0;    // highest during F
  int64_t forward_held = 0;    // after F: saved tensors, plus the output, less the input if it was not kept
  int64_t p1_peak = 0;         // highest during I
  int64_t p1_held = 0;         // after I, dL/dx included: may be negative
  int64_t stash = 0;           // kept for W, freed by it
  int64_t p2_peak = 0;         // highest during W
  int64_t output = 0;          // the output itself: it leaves the stage at a boundary
  int64_t input_gradient = 0;  // dL/dx itself

  double seconds() const { return forward + backward_p1 + backward_p2; }
};

// The costs of each kind of layer, by LayerSpec::kind.
using Profile = std::map<std::string, LayerProfile>;

// Runs a short chain of layers with each kind, in model order, on the calling thread and its compute threads:
// once to warm up, then until `seconds` have passed, at least 3 and at most 25 times. `fields` is one
// micro-batch. On a device, each op runs in the compute stream, and its time includes the wait for its end.
Profile measure_profile(const ModelSpec& model, const Fields& fields, double seconds = 0.3,
                        const Device& device = {});

// The costs of all layers in model order.
std::vector<LayerProfile> layer_profiles(const ModelSpec& model, const Profile& profile);

}  // namespace twobp
