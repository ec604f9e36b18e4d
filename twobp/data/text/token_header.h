// The first bytes of a token file. The files of llm.c's scripts have a header: 256 numbers of 32 bits (a mark, a
// version, the number of tokens, and zeros), and then the tokens.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "twobp/data/text/token_dataset.h"
#include "twobp/files/input_file.h"

namespace twobp {

inline constexpr int64_t kLlmcHeaderBytes = 1024;

// The type of the tokens that follow llm.c's header, or none for a file without one. `name` is the data's name for
// messages. Throws Error if the version is unknown or the file's size is not what the header says, or for a file of
// another format, by its first bytes.
std::optional<TokenType> read_token_header(const std::string& name, const InputFile& file);

}  // namespace twobp
