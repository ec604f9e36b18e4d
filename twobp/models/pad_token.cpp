#include "twobp/models/pad_token.h"

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"

namespace twobp {
namespace {

constexpr const char* kPadToken = "pad_token_id";

}  // namespace

int64_t read_pad_token(const CheckedJson& file, int64_t vocab, int64_t otherwise) {
  const nlohmann::json* value = file.find(kPadToken);
  if (value == nullptr) return file.object.contains(kPadToken) ? -1 : otherwise;
  TWOBP_CHECK(value->is_number_integer(), file.origin, ": ", kPadToken, " is ", shown(*value), ", not an integer");
  const bool fits = !value->is_number_unsigned() || value->get<uint64_t>() <= INT64_MAX;
  const int64_t token = fits ? value->get<int64_t>() : INT64_MAX;
  TWOBP_CHECK(token >= -vocab && token < vocab, file.origin, ": ", kPadToken, " ", shown(*value),
              " is outside the vocabulary of ", vocab,
              ", so transformers refuses the model: set it to the padding token, or to null");
  return token < 0 ? token + vocab : token;
}

void write_pad_token(int64_t pad_token, nlohmann::json& out) {
  if (out.contains(kPadToken)) return;
  out[kPadToken] = pad_token < 0 ? nlohmann::json() : nlohmann::json(pad_token);
}

void check_pad_token(int64_t pad_token, int64_t vocab) {
  TWOBP_CHECK(pad_token < vocab, "model.pad_token (", pad_token, ") is outside the vocabulary of ", vocab,
              ": set it to the padding token, or to -1 for none.");
}

}  // namespace twobp
