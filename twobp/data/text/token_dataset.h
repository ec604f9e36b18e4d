// Token files as training data: raw numbers, memory-mapped, converted as they are read.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "twobp/data/data.h"
#include "twobp/files/mapped_file.h"

namespace twobp {

// What a token file holds: unsigned numbers, little-endian, one after the other, nothing else.
enum class TokenType { kUInt16, kUInt32 };

TokenType parse_token_type(std::string_view name);  // "uint16", "uint32"; throws Error otherwise
std::string_view token_type_name(TokenType type);
int64_t token_bytes(TokenType type);

// The files are one long row of tokens, as the files of TextDataset are one of bytes: sample i has as
// `input_ids` the S tokens from token i * S on, and as `labels` the S tokens from the one after. A sample may
// begin in one file and end in the next; what does not fill a sample at the end of the last is left out.
class TokenDataset : public Dataset {
 public:
  // `name` of the data is for messages: "data.tokens". Throws Error: a file cannot be read, is empty, its
  // size is no multiple of the type's, it holds numbers of the other type (as far as the first ones tell),
  // or, where all the files are small enough for that to take no time, an id >= vocab.
  TokenDataset(std::string name, const std::vector<std::string>& files, TokenType type, int64_t sequence,
               int64_t vocab);

  int64_t size() const override;
  // Throws Error: an id >= vocab (file, position, value).
  Fields read(const std::vector<int64_t>& indices, int64_t epoch) const override;

  // "3 files, 1200 tokens in all": for messages.
  std::string description() const;

 private:
  int64_t tokens() const { return ends_.empty() ? 0 : ends_.back(); }
  void copy(int64_t begin, int64_t count, int64_t* to) const;
  [[noreturn]] void refuse(const MappedFile& file, int64_t position, int64_t id) const;

  std::string name_;
  TokenType type_;
  int64_t sequence_;
  int64_t vocab_;
  std::vector<MappedFile> files_;
  std::vector<int64_t> ends_;  // [file]: tokens up to its end, those of the files before included
};

}  // namespace twobp
