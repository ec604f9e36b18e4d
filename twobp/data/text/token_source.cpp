// Ids are checked on every read. Small files are also read once on opening, so that a bad id is found before
// training. Large files would take as long as the disk does.
#include "twobp/data/text/token_source.h"

#include <algorithm>
#include <array>
#include <bit>
#include <optional>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/files/input_file.h"

namespace twobp {
namespace {

static_assert(std::endian::native == std::endian::little, "token files are little-endian");

constexpr int64_t kScannedBytes = int64_t{1} << 30;  // about 0.1 s from memory
constexpr int64_t kProbedTokens = 4096;
constexpr int64_t kTellingTokens = 64;  // fewer may all be even by chance

template <typename Number>
std::vector<Number> read_numbers(const InputFile& file, int64_t begin, int64_t count) {
  std::vector<Number> numbers(static_cast<size_t>(count));
  file.read(static_cast<size_t>(begin) * sizeof(Number), numbers.data(), numbers.size() * sizeof(Number));
  return numbers;
}

// Reads `count` tokens from token `begin` on, and calls action(const uint16_t* or const uint32_t*) with them.
template <typename Action>
auto visit(const InputFile& file, TokenType type, int64_t begin, int64_t count, Action&& action) {
  return type == TokenType::kUInt16 ? action(read_numbers<uint16_t>(file, begin, count).data())
                                    : action(read_numbers<uint32_t>(file, begin, count).data());
}

struct Outside {
  int64_t position = 0;
  int64_t id = 0;
};

// The first id >= vocab among the `count` tokens after the header, which has the room of `header` tokens.
std::optional<Outside> find_outside(const InputFile& file, TokenType type, int64_t header, int64_t count,
                                    int64_t vocab) {
  constexpr int64_t kBlock = 1 << 16;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t here = std::min(kBlock, count - begin);
    const auto found = visit(file, type, header + begin, here, [&](const auto* tokens) -> std::optional<Outside> {
      auto largest = tokens[0];  // the compiler vectorizes a maximum, but not a search
      for (int64_t i = 0; i < here; ++i) largest = std::max(largest, tokens[i]);
      if (static_cast<int64_t>(largest) < vocab) return std::nullopt;
      int64_t i = 0;
      while (static_cast<int64_t>(tokens[i]) < vocab) ++i;
      return Outside{begin + i, static_cast<int64_t>(tokens[i])};
    });
    if (found) return found;
  }
  return std::nullopt;
}

// The largest upper half of a 32-bit id.
int64_t largest_half(int64_t vocab) {
  return (vocab - 1) >> 16;
}

// 32-bit ids, read as 16-bit numbers, are valid ids with a small number after each. The vocabulary check
// cannot find them, so they are detected here.
bool looks_like_uint32(const InputFile& file, int64_t count, int64_t vocab) {
  if (count < kTellingTokens || count % 2 != 0) return false;
  const int64_t probed = std::min(count, kProbedTokens);
  return visit(file, TokenType::kUInt16, 0, probed, [&](const auto* tokens) {
    bool all_small = true;
    for (int64_t i = 0; i < probed; i += 2) {
      if (tokens[i + 1] > largest_half(vocab)) return false;
      all_small = all_small && tokens[i] <= largest_half(vocab);
    }
    return !all_small;
  });
}

struct Format {
  int32_t mark;
  int32_t version;
  TokenType type;
};
constexpr std::array<Format, 2> kFormats = {{{20240520, 1, TokenType::kUInt16}, {20240801, 7, TokenType::kUInt32}}};

constexpr int64_t kLlmcHeaderBytes = 1024;
constexpr int32_t kChoicesMark = 20240522;  // questions with several answers, such as HellaSwag

// The files of llm.c's scripts have a header: 256 numbers of 32 bits (a mark, a version, the number of
// tokens, and zeros), and then the tokens. Returns their type, or none for a file without one. Throws Error
// if the version is unknown or the file's size is not what the header says, or for a file of another format,
// by its first bytes.
std::optional<TokenType> read_token_header(const std::string& name, const InputFile& file) {
  const std::string& path = file.path();
  const auto bytes = static_cast<int64_t>(file.size());
  std::array<int32_t, 3> head{};
  if (file.size() < sizeof(head)) return std::nullopt;
  file.read(0, head.data(), sizeof(head));
  const KnownFormat* other = known_format(file);
  TWOBP_CHECK(other == nullptr || other->as_tokens.empty(), name, ": ", path, " ", other->is, ": ", other->as_tokens);
  TWOBP_CHECK(head[0] != kChoicesMark, name, ": ", path,
              " holds llm.c's questions with several answers, not a text: remove it from ", name, ".");
  for (const Format& format : kFormats) {
    if (head[0] != format.mark) continue;
    TWOBP_CHECK(head[1] == format.version, name, ": ", path, " has llm.c's header of version ", head[1],
                ", but only version ", format.version, " is known for ", token_type_name(format.type),
                ": write it again with a current llm.c.");
    const int64_t expected = kLlmcHeaderBytes + head[2] * token_bytes(format.type);
    TWOBP_CHECK(head[2] > 0 && bytes == expected, name, ": ", path, " has ", bytes,
                " bytes, but its llm.c header says ", head[2], " tokens of ", token_type_name(format.type),
                ", which take ", expected, ": it is truncated, so write it again.");
    return format.type;
  }
  return std::nullopt;
}

}  // namespace

TokenType parse_token_type(std::string_view name) {
  for (const TokenType type : {TokenType::kUInt16, TokenType::kUInt32}) {
    if (token_type_name(type) == name) return type;
  }
  fail("\"", name, "\" is not a type of token files: use uint16 or uint32.");
}

std::string_view token_type_name(TokenType type) {
  return type == TokenType::kUInt16 ? "uint16" : "uint32";
}

int64_t token_bytes(TokenType type) {
  return type == TokenType::kUInt16 ? 2 : 4;
}

TokenFiles::TokenFiles(std::string name, const std::vector<std::string>& files, std::optional<TokenType> given,
                       int64_t vocab)
    : name_(std::move(name)), vocab_(vocab) {
  for (const auto& path : files) {
    const InputFile& file = files_.emplace_back(path);
    const auto bytes = static_cast<int64_t>(file.size());
    const std::optional<TokenType> header = read_token_header(name_, file);
    TWOBP_CHECK(!header || !given || *header == *given, name_, ": ", path, " has llm.c's header for ",
                token_type_name(header.value_or(type_)), ", but data.token_type is ",
                token_type_name(given.value_or(type_)), ": remove data.token_type.");
    const TokenType type = header.value_or(given.value_or(TokenType::kUInt16));
    TWOBP_CHECK(files_.size() == 1 || type == type_, name_, ": ", path, " holds ", token_type_name(type),
                header ? " by its header" : " (it has no header)", ", but ", files_.front().path(), " holds ",
                token_type_name(type_), ": give files of one type.");
    type_ = type;
    TWOBP_CHECK(bytes > 0, name_, ": ", path, " is empty: remove it, or write it again.");
    headers_.push_back(header ? kLlmcHeaderBytes / token_bytes(type) : 0);
    TWOBP_CHECK(bytes % token_bytes(type) == 0, name_, ": ", path, " has ", bytes,
                " bytes, which is no multiple of the ", token_bytes(type), " of a ", token_type_name(type),
                ": it is truncated, or data.token_type is wrong.");
    const int64_t count = bytes / token_bytes(type) - headers_.back();
    TWOBP_CHECK(header || type != TokenType::kUInt16 || !looks_like_uint32(file, count, vocab), name_, ": ", path,
                ": every second number is at most ", largest_half(vocab),
                ", so it holds uint32, not uint16: set data.token_type to uint32.");
    ends_.push_back(tokens() + count);
  }
  if (tokens() * token_bytes(type_) > kScannedBytes) return;
  for (size_t i = 0; i < files_.size(); ++i) {
    const int64_t count = ends_[i] - (i == 0 ? 0 : ends_[i - 1]);
    if (const auto outside = find_outside(files_[i], type_, headers_[i], count, vocab_))
      refuse(i, outside->position, outside->id);
  }
}

void TokenFiles::refuse(size_t file, int64_t position, int64_t id) const {
  const TokenType other = type_ == TokenType::kUInt16 ? TokenType::kUInt32 : TokenType::kUInt16;
  const std::string or_type =
      concat(", or set data.token_type to ", token_type_name(other), " if the file holds those");
  fail(name_, ": ", files_[file].path(), ": token ", position, " is ", id, ", outside the vocabulary of ", vocab_,
       " tokens (0 to ", vocab_ - 1,
       "): for a new model, set model.vocab to the tokenizer's size; for "
       "model.from, give tokens of that model's tokenizer",
       headers_[file] == 0 ? or_type : "", ".");
}

void TokenFiles::copy(int64_t begin, int64_t count, int64_t* to) const {
  auto index = static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin());
  for (; count > 0; ++index) {
    const InputFile& file = files_[index];
    const int64_t at = begin - (index == 0 ? 0 : ends_[index - 1]);
    const int64_t here = std::min(count, ends_[index] - begin);
    visit(file, type_, headers_[index] + at, here, [&](const auto* tokens) { std::copy_n(tokens, here, to); });
    // The copy is checked, because the file might change between the check and the use.
    const int64_t* outside = std::find_if(to, to + here, [this](int64_t id) { return id >= vocab_; });
    if (outside != to + here) refuse(index, at + (outside - to), *outside);
    begin += here;
    to += here;
    count -= here;
  }
}

std::string TokenFiles::description() const {
  return concat(files_.size(), files_.size() == 1 ? " file, " : " files, ", tokens(), " tokens",
                files_.size() == 1 ? "" : " in all");
}

TokenDataset::TokenDataset(std::shared_ptr<const TokenSource> tokens, int64_t sequence)
    : tokens_(std::move(tokens)), sequence_(sequence) {
  TWOBP_CHECK(sequence >= 1, "data.sequence is ", sequence, ", but must be at least 1.");
}

TokenDataset::TokenDataset(std::string name, const std::vector<std::string>& files, std::optional<TokenType> given,
                           int64_t sequence, int64_t vocab)
    : TokenDataset(std::make_shared<TokenFiles>(std::move(name), files, given, vocab), sequence) {}

int64_t TokenDataset::size() const {
  return (std::max<int64_t>(tokens_->tokens(), 1) - 1) / sequence_;
}

Fields TokenDataset::read(const std::vector<int64_t>& indices, int64_t /*epoch*/) const {
  const auto count = static_cast<int64_t>(indices.size());
  const at::Tensor rows = at::empty({count, sequence_ + 1}, at::kLong);  // (B, S + 1)
  for (int64_t b = 0; b < count; ++b) {
    const int64_t index = indices[static_cast<size_t>(b)];
    TWOBP_CHECK(index >= 0 && index < size(), tokens_->name(), ": no sample ", index, ", there are ", size(), ".");
    tokens_->copy(index * sequence_, sequence_ + 1, rows.data_ptr<int64_t>() + b * (sequence_ + 1));
  }
  return {{"input_ids", rows.narrow(1, 0, sequence_).contiguous()},
          {"labels", rows.narrow(1, 1, sequence_).contiguous()}};
}

}  // namespace twobp
