// What each file of this folder gives.
#pragma once

#include "twobp/models/architecture.h"

namespace twobp {

Architecture bert_architecture();
Architecture llama_architecture();
Architecture mamba_architecture();
Architecture mlp_architecture();
Architecture resnet_architecture();

// The width of a SwiGLU MLP: as configured, or, for 0, dim * 8 / 3 rounded up to a multiple of 64.
int64_t mlp_width(int64_t hidden, int64_t dim);

}  // namespace twobp
