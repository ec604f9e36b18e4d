// Errors of layers name the layer.
#pragma once

#include <string>

#include "twobp/core/check.h"
#include "twobp/nn/thrown.h"
#include "twobp/transport/transport.h"

namespace twobp {

// Runs `body`. Its errors begin with where(), such as "stage 1, layer model.layers.0".
template <typename Where, typename Body>
decltype(auto) naming_layer(const Where& where, const Body& body) {
  try {
    return body();
  } catch (const Aborted&) {
    throw;
  } catch (...) {
    fail(where(), ": ", message_of_thrown());
  }
}

}  // namespace twobp
