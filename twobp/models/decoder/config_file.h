// Reads and writes the config.json of a decoder, as its family's table says.
#pragma once

#include <cstdint>

#include <nlohmann/json_fwd.hpp>

#include "twobp/models/checked_json.h"
#include "twobp/models/decoder/family.h"

namespace twobp {

// Throws Error if a value is missing or of the wrong type, or for a key that asks for something that we do not compute:
// every key must be one that is read, or known to change nothing.
void read_decoder(const DecoderFamily& family, const CheckedJson& file, DecoderOptions& options);

// Writes the options over `out`, the config.json of a loaded model. `sequence` is the longest one that the model must
// accept. Throws Error for options that transformers refuses.
void write_decoder(const DecoderFamily& family, const DecoderOptions& options, int64_t sequence, nlohmann::json& out);

}  // namespace twobp
