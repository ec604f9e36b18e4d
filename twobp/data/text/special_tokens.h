// The tokens of a tokenizer.json that are no text, by their parts in a masked language model.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace twobp {

struct SpecialTokens {
  int64_t begin = 0;         // [CLS]
  int64_t end = 0;           // [SEP]
  int64_t mask = 0;          // [MASK]
  std::vector<int64_t> all;  // sorted: these, [PAD], [UNK] and whatever else is special
  int64_t vocab = 0;         // the largest id of the tokenizer plus 1
};

// From a tokenizer.json (or the one in that folder), without Python. Names are those that the
// tokenizer_config.json beside it gives for cls_token, sep_token and mask_token; without them [CLS], [SEP],
// [MASK] or <s>, </s>, <mask>. Throws Error: no such file, not a tokenizer, a token that is missing (which
// one; the tokenizer is of another model).
SpecialTokens read_special_tokens(const std::string& tokenizer);

// For text that is read as bytes: ids 256 to 259 are begin, end, mask and padding.
inline constexpr int64_t kMaskedByteVocab = 260;

}  // namespace twobp
