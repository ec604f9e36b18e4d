// The tokens of texts, one after the other. Any thread may read it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "twobp/data/data.h"
#include "twobp/files/input_file.h"

namespace twobp {

class TokenSource {
 public:
  virtual ~TokenSource() = default;
  virtual std::string name() const = 0;  // of the data, for messages: "data.tokens"
  virtual int64_t tokens() const = 0;
  // The tokens [begin, begin + count), which must exist.
  virtual void copy(int64_t begin, int64_t count, int64_t* to) const = 0;
  // "3 files, 1200 tokens in all": for messages.
  virtual std::string description() const = 0;
};

// Texts whose tokens are their bytes, in memory.
class ByteSource : public TokenSource {
 public:
  // `origin` names the files, for messages.
  explicit ByteSource(std::string bytes, std::string origin = "the text")
      : bytes_(std::move(bytes)), origin_(std::move(origin)) {}

  std::string name() const override { return "data.text"; }
  int64_t tokens() const override { return static_cast<int64_t>(bytes_.size()); }
  void copy(int64_t begin, int64_t count, int64_t* to) const override {
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<unsigned char>(bytes_[static_cast<size_t>(begin + i)]);
  }
  std::string description() const override { return origin_ + ": " + std::to_string(bytes_.size()) + " bytes"; }

 private:
  std::string bytes_;
  std::string origin_;
};

// Token files: raw numbers, converted as they are read. They may begin with llm.c's header.
// The contents of a token file: unsigned little-endian numbers.
enum class TokenType { kUInt16, kUInt32 };

TokenType parse_token_type(std::string_view name);  // "uint16", "uint32"; throws Error otherwise
std::string_view token_type_name(TokenType type);
int64_t token_bytes(TokenType type);

// The files follow one another.
class TokenFiles : public TokenSource {
 public:
  // `name` is the data's name for messages: "data.tokens". Without `given`, the type is that of the header,
  // or uint16 for files without one. Throws Error if a file cannot be read or is empty, its size is no
  // multiple of the type's, or its header or its first numbers show that it has another type. If all files
  // are small enough to check quickly, also for an id >= vocab.
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

// A source of tokens as training data, cut into samples.
// The `input_ids` of sample i are the S tokens from token i * S on, and its `labels` are the S tokens from
// the following token on. A sample may begin in one file and end in the next. An incomplete sample at the end
// is left out.
class TokenDataset : public Dataset {
 public:
  TokenDataset(std::shared_ptr<const TokenSource> tokens, int64_t sequence);
  // Reads token files: see TokenFiles.
  TokenDataset(std::string name, const std::vector<std::string>& files, std::optional<TokenType> given,
               int64_t sequence, int64_t vocab);

  int64_t size() const override;
  Fields read(const std::vector<int64_t>& indices, int64_t epoch) const override;

  std::string description() const { return tokens_->description(); }

 private:
  std::shared_ptr<const TokenSource> tokens_;
  int64_t sequence_;
};

}  // namespace twobp
