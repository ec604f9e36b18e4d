// Tokenized text, kept on disk so that each text is encoded once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "twobp/data/text/token_source.h"

namespace twobp {

struct TokenizedText {
  std::vector<std::string> files;  // one token file; none if the texts have no tokens
  TokenType type = TokenType::kUInt16;
};

// Encodes `texts` (file names), one after the other, with a tokenizer.json (or the one in that folder), see
// Tokenizer::encode_all. With `end_of_text`, the tokenizer's end-of-text token, if it has one, follows each
// text that does not end with it. The tokens of all texts are kept in a folder as NAME-HASH.bin, and
// NAME-HASH.json next to it records what they were made from. They are reused, without Python, as long as the
// texts' paths, sizes, inodes and times of change and the tokenizer are the same. Both files appear only when
// they are complete. Runs that need the same folder wait for each other.
//
// The folder is `cache` or, if that is empty, $XDG_CACHE_HOME/twobp or ~/.cache/twobp.
//
// Throws Error for a text that cannot be read or that changes in the meantime, a tokenizer with more ids than
// `vocab` (the model's), a folder that cannot be written, or a full disk. Also throws what Tokenizer throws.
TokenizedText tokenize_text(const std::vector<std::string>& texts, const std::string& tokenizer,
                            const std::string& cache, int64_t vocab, bool end_of_text);

}  // namespace twobp
