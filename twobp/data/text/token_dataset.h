// Token files as training data: raw numbers, converted as they are read. They may begin with llm.c's header.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "twobp/data/data.h"
#include "twobp/files/input_file.h"

namespace twobp {

// The contents of a token file: unsigned little-endian numbers.
enum class TokenType { kUInt16, kUInt32 };

TokenType parse_token_type(std::string_view name);  // "uint16", "uint32"; throws Error otherwise
std::string_view token_type_name(TokenType type);
int64_t token_bytes(TokenType type);

// The files form one long sequence of tokens, as the files of TextDataset form one of bytes. The `input_ids`
// of sample i are the S tokens from token i * S on, and its `labels` are the S tokens from the following
// token on. A sample may begin in one file and end in the next. An incomplete sample at the end of the last
// file is left out.
class TokenDataset : public Dataset {
 public:
  // `name` is the data's name for messages: "data.tokens". Without `given`, the type is that of the header,
  // or uint16 for files without one. Throws Error if a file cannot be read or is empty, its size is no
  // multiple of the type's, or its header or its first numbers show that it has another type. If all files
  // are small enough to check quickly, also for an id >= vocab.
  TokenDataset(std::string name, const std::vector<std::string>& files, std::optional<TokenType> given,
               int64_t sequence, int64_t vocab);

  int64_t size() const override;
  // Throws Error for an id >= vocab (file, position, value), or if a file has become shorter.
  Fields read(const std::vector<int64_t>& indices, int64_t epoch) const override;

  // "3 files, 1200 tokens in all": for messages.
  std::string description() const;

 private:
  int64_t tokens() const { return ends_.empty() ? 0 : ends_.back(); }
  void copy(int64_t begin, int64_t count, int64_t* to) const;
  [[noreturn]] void refuse(size_t file, int64_t position, int64_t id) const;

  std::string name_;
  TokenType type_ = TokenType::kUInt16;
  int64_t sequence_;
  int64_t vocab_;
  std::vector<InputFile> files_;
  std::vector<int64_t> headers_;  // [file]: number of tokens that would fit into its header; 0: no header
  std::vector<int64_t> ends_;     // [file]: number of tokens up to its end, including the earlier files
};

}  // namespace twobp
