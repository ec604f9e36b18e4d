// Reads and writes which layers of a decoder have a window, and which have rotary embedding, in config.json.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "twobp/models/checked_json.h"
#include "twobp/models/decoder/family.h"

namespace twobp {

// Throws Error for a window of 0 and for lists that do not fit the number of layers, which has been read.
void read_windows(const DecoderFamily& family, const CheckedJson& file, DecoderOptions& options);

// Throws Error for windows that the family's config.json cannot express.
void write_windows(const DecoderFamily& family, const DecoderOptions& options, nlohmann::json& out);

// The keys of config.json that read_windows reads.
std::vector<std::string> window_keys(const DecoderFamily& family);

}  // namespace twobp
