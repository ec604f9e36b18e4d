#include "twobp/data/text/plain_text.h"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/files/paths.h"

namespace twobp {
namespace {

constexpr size_t kBlock = 1 << 20;
constexpr size_t kLongestCharacter = 4;

// Index of the first byte that begins no character of a text, or the length of the text.
size_t end_of_text(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const Character one = first_character(text.substr(at));
    if (one.bytes == 0 || one.code == 0) return at;
    at += one.bytes;
  }
  return text.size();
}

}  // namespace

void check_text(const InputFile& file) {
  constexpr std::array kRecords = {".json", ".jsonl", ".ndjson", ".jsonlines", ".jl", ".parquet", ".csv", ".tsv"};
  const std::string ending = lower_extension(file.path());
  TWOBP_CHECK(std::find(kRecords.begin(), kRecords.end(), ending) == kRecords.end(), "data.text: ", file.path(),
              " has records, not plain text: make arrays of them by scripts/texts_to_arrays.py, which reads .jsonl and "
              ".parquet files, or give the name another ending if the syntax is the text.");
  const KnownFormat* format = known_format(file);
  TWOBP_CHECK(format == nullptr, "data.text: ", file.path(), " ", format->is, ": ", format->as_text);
  std::string block;
  for (size_t begin = 0; begin < file.size();) {
    block.resize(std::min(kBlock, file.size() - begin));
    file.read(begin, block.data(), block.size());
    const size_t end = end_of_text(block);
    const bool cut = block.size() - end < kLongestCharacter && begin + block.size() < file.size();
    TWOBP_CHECK(end == block.size() || (cut && end > 0), file.path(), ": byte ", begin + end,
                block[end] == 0 ? " is zero" : " is not UTF-8",
                ": convert the text, for instance with iconv, or remove it. Data that is no text goes to "
                "data.tokens.");
    begin += end;
  }
}

}  // namespace twobp
