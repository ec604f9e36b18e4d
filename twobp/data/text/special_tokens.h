// The special tokens of a tokenizer.json, by their roles in a masked language model.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace twobp {

struct SpecialTokens {
  int64_t begin = 0;         // [CLS]
  int64_t end = 0;           // [SEP]
  int64_t mask = 0;          // [MASK]
  std::vector<int64_t> all;  // sorted: the above, [PAD], [UNK] and all other special tokens
  int64_t vocab = 0;         // the largest id of the tokenizer plus 1
};

// Reads a tokenizer.json (or the one in that folder), without Python. The names are those of cls_token, sep_token and
// mask_token in the tokenizer_config.json next to it. Otherwise they are [CLS], [SEP], [MASK] or <s>, </s>, <mask>.
// Throws Error if the file does not exist or is not a tokenizer, or a token is missing (it is named; the tokenizer is
// of another model).
SpecialTokens read_special_tokens(const std::string& tokenizer);

// For text that is read as bytes. Ids 256 to 259 are begin, end, mask and padding.
inline constexpr int64_t kMaskedByteVocab = 260;

}  // namespace twobp
