// What a model reads, as far as its data must know.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace twobp {

enum class InputKind : uint8_t {
  kTokens,        // input_ids, labels: the token that follows
  kMaskedTokens,  // input_ids, labels: the token that was masked
  kImages,        // pixel_values, labels: a class each
  kVectors,       // input, target
};

// The unit that a Batch's `tokens` counts: "tokens", "images", "vectors".
std::string_view item_name(InputKind kind);

struct ModelInput {
  InputKind kind = InputKind::kTokens;
  int64_t vocab = 256;         // of tokens
  int64_t channels = 3;        // of pictures
  int64_t classes = 1000;      // of pictures
  int64_t width = 256;         // of vectors
  int64_t token_types = 0;     // of token_type_ids; 0: not read
  int64_t longest = 0;         // sequence; 0: any
  std::string type = "llama";  // model.type, for messages
  std::string from;            // model.from, which may hold a tokenizer; empty: a new model
};

}  // namespace twobp
