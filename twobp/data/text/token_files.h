// Token files: raw numbers, converted as they are read. They may begin with llm.c's header.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "twobp/data/text/token_source.h"
#include "twobp/files/input_file.h"

namespace twobp {

// The contents of a token file: unsigned little-endian numbers.
enum class TokenType { kUInt16, kUInt32 };

TokenType parse_token_type(std::string_view name);  // "uint16", "uint32"; throws Error otherwise
std::string_view token_type_name(TokenType type);
int64_t token_bytes(TokenType type);

// The files follow one another, as those of TextDataset do.
class TokenFiles : public TokenSource {
 public:
  // `name` is the data's name for messages: "data.tokens". Without `given`, the type is that of the header, or uint16
  // for files without one. Throws Error if a file cannot be read or is empty, its size is no multiple of the type's, or
  // its header or its first numbers show that it has another type. If all files are small enough to check quickly, also
  // for an id >= vocab.
  TokenFiles(std::string name, const std::vector<std::string>& files, std::optional<TokenType> given, int64_t vocab);

  std::string name() const override { return name_; }
  int64_t tokens() const override { return ends_.empty() ? 0 : ends_.back(); }
  // Throws Error for an id >= vocab (file, position, value), or if a file has become shorter.
  void copy(int64_t begin, int64_t count, int64_t* to) const override;
  std::string description() const override;

 private:
  [[noreturn]] void refuse(size_t file, int64_t position, int64_t id) const;

  std::string name_;
  TokenType type_ = TokenType::kUInt16;
  int64_t vocab_;
  std::vector<InputFile> files_;
  std::vector<int64_t> headers_;  // [file]: number of tokens that would fit into its header; 0: no header
  std::vector<int64_t> ends_;     // [file]: number of tokens up to its end, including the earlier files
};

}  // namespace twobp
