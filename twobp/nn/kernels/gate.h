// The activations of gated linear units.
#pragma once

#include <cstdint>

namespace twobp {

enum class Gate : uint8_t { kSilu, kGelu, kGeluTanh };

}  // namespace twobp
