// Tokenized text, kept on disk so that each text is encoded once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "twobp/data/text/token_dataset.h"

namespace twobp {

struct TokenizedText {
  std::vector<std::string> files;  // token files, one per text that has any tokens, in the order of the texts
  TokenType type = TokenType::kUInt16;
};

// Encodes each of `texts` (file names) with a tokenizer.json (or the one in that folder), see
// Tokenizer::encode_all. A text's tokens are kept in a folder as NAME-HASH.bin, beside it NAME-HASH.json that
// says what they were made from: they are used again as long as the text's path, size and time of change and
// the tokenizer.json are the same, without Python. Both files appear only when they are whole. Runs that want
// the same folder wait for each other.
//
// The folder is `cache` or, if that is empty, .twobp-cache beside the first text; if that cannot be written,
// $XDG_CACHE_HOME/twobp or ~/.cache/twobp.
//
// Throws Error: what Tokenizer throws, a text that cannot be read or changes meanwhile, a tokenizer with more
// ids than `vocab` (the model's), a folder that cannot be written, a full disk.
TokenizedText tokenize_text(const std::vector<std::string>& texts, const std::string& tokenizer,
                            const std::string& cache, int64_t vocab);

}  // namespace twobp
