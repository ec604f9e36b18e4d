// Checks the split backward pass of a layer against finite differences, for tests of your own layers.
#pragma once

#include <cstdint>

#include "twobp/nn/layer.h"

namespace twobp {

struct LayerCheck {
  Fields fields;            // of the micro-batch, such as the labels of a loss
  double loss_weight = 1;   // Context::loss_weight
  uint64_t seed = 1;        // of the weights that have no values yet, and of the output's gradient
  int64_t elements = 60;    // most elements of a tensor that are differentiated, spread over it
  double step = 1e-5;       // of the differences; a larger one is exacter, if the layer is smooth over 4 steps
  double tolerance = 1e-6;  // largest error, relative to the largest element of the gradient
};

// Runs F, I and W of a float64 layer on the input `x` (empty for a layer that takes none), and compares dL/dx and the
// gradient of every parameter with central differences of F. Then runs two micro-batches interleaved, whose gradients
// must be the sum of those of each alone. Parameters without values are allocated; norm gains and biases then get
// values other than 1 and 0. Buffers may change. Throws Error that names the tensor, the element and both values, or
// the parameter that got no gradient; also if the layer throws anything.
void check_layer(Layer& layer, const Values& x, const LayerCheck& options = {});

}  // namespace twobp
