// Decoders of text (LLaMa, arXiv 2302.13971, and its relatives), made of split layers: an embedding, blocks and a head.
// A block is an attention half and an MLP half. The halves are separate layers, so that a stage may end between them.
// The head is norm, projection and cross-entropy. family.h has the differences between the families.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "twobp/models/decoder/family.h"
#include "twobp/models/model_type.h"

namespace twobp {

// Throws Error for sizes below 1.
ModelSpec decoder(const DecoderFamily& family, const DecoderOptions& options, const BuildSettings& settings = {});
ModelSpec llama(const DecoderOptions& options, const BuildSettings& settings = {});

// The MLP half of a block, with its norms and the residual. The options are filled in.
std::unique_ptr<Layer> decoder_mlp(const DecoderFamily& family, const DecoderOptions& options,
                                   const BuildSettings& settings, const std::string& block);

// A model type for each family, in the order of the table.
std::vector<ModelType> decoder_types();

}  // namespace twobp
