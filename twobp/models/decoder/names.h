// The tensors of a decoder's Hugging Face directory that are not its parameters, or have other names.
#pragma once

#include "twobp/models/decoder/family.h"
#include "twobp/models/model_weights.h"

namespace twobp {

// The options are filled in.
TensorNames decoder_names(const DecoderFamily& family, const DecoderOptions& options);

}  // namespace twobp
