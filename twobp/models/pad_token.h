// The padding token of a model. transformers gives its embedding no gradient.
#pragma once

#include <cstdint>

#include <nlohmann/json_fwd.hpp>

#include "twobp/models/checked_json.h"

namespace twobp {

// Reads pad_token_id as transformers does: a negative one counts from the end of the vocabulary. Returns `otherwise` if
// the file does not have the key, and -1 if it is null. Throws Error if it is outside the vocabulary.
int64_t read_pad_token(const CheckedJson& file, int64_t vocab, int64_t otherwise = -1);

// Adds pad_token_id unless the file has it. -1 becomes null, because some models of transformers have another default.
void write_pad_token(int64_t pad_token, nlohmann::json& out);

// Throws Error if model.pad_token is outside the vocabulary.
void check_pad_token(int64_t pad_token, int64_t vocab);

}  // namespace twobp
