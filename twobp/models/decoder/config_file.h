// Reads and writes the config.json of a decoder, as its family's table says.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

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

// The rotary embedding in config.json: in the form of transformers 4 (rope_theta and rope_scaling beside the other
// keys) and of transformers 5 (rope_parameters, by kind of layer if they differ). We write the first, which both read.

// Throws Error for a kind of stretching or a key of it that we do not have. The sizes of heads have been read.
void read_rope(const DecoderFamily& family, const CheckedJson& file, DecoderOptions& options);

void write_rope(const DecoderFamily& family, const DecoderOptions& options, nlohmann::json& out);

// The keys of config.json that read_rope reads.
std::vector<std::string> rope_keys(const DecoderFamily& family);

// Reads and writes which layers of a decoder have a window, and which have rotary embedding, in config.json.

// Throws Error for a window of 0 and for lists that do not fit the number of layers, which has been read.
void read_windows(const DecoderFamily& family, const CheckedJson& file, DecoderOptions& options);

// Throws Error for windows that the family's config.json cannot express.
void write_windows(const DecoderFamily& family, const DecoderOptions& options, nlohmann::json& out);

// The keys of config.json that read_windows reads.
std::vector<std::string> window_keys(const DecoderFamily& family);

}  // namespace twobp
