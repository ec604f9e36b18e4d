// Measured costs of one micro-batch in each kind of layer: seconds of F, I and W, and bytes. They give the
// split into stages, the byte cap, and the growth that the executor makes room for.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "twobp/models/model.h"
#include "twobp/nn/context.h"
#include "twobp/nn/device/device.h"
#include "twobp/schedule/simulate/layer_cost.h"

namespace twobp {

// The costs of each kind of layer, by LayerSpec::kind.
using Profile = std::map<std::string, LayerCost>;

// Runs a short chain of layers with each kind, in model order, on the calling thread and its compute threads:
// once to warm up, then until `seconds` have passed, at least 3 and at most 25 times. `fields` is one
// micro-batch. On a device, each op runs in the compute stream, and its time includes the wait for its end.
Profile measure_profile(const ModelSpec& model, const Fields& fields, double seconds = 0.3,
                        const Device& device = {});

// The costs of all layers in model order.
std::vector<LayerCost> layer_costs(const ModelSpec& model, const Profile& profile);

}  // namespace twobp
