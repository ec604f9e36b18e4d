// The rotary embedding in config.json: in the form of transformers 4 (rope_theta and rope_scaling beside the other
// keys) and of transformers 5 (rope_parameters, by kind of layer if they differ). We write the first, which both read.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "twobp/models/checked_json.h"
#include "twobp/models/decoder/family.h"

namespace twobp {

// Throws Error for a kind of stretching or a key of it that we do not have. The sizes of heads have been read.
void read_rope(const DecoderFamily& family, const CheckedJson& file, DecoderOptions& options);

void write_rope(const DecoderFamily& family, const DecoderOptions& options, nlohmann::json& out);

// The keys of config.json that read_rope reads.
std::vector<std::string> rope_keys(const DecoderFamily& family);

}  // namespace twobp
