#include "twobp/data/text/text_file.h"

#include <algorithm>
#include <string>
#include <string_view>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/data/extension.h"
#include "twobp/files/known_format.h"

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

void check_no_other_format(const InputFile& file) {
  const KnownFormat* format = known_format(file);
  TWOBP_CHECK(format == nullptr, "data.text: ", file.path(), " ", format->is, ": ", format->as_text);
}

void check_text(const InputFile& file) {
  TWOBP_CHECK(lower_extension(file.path()) != ".json", "data.text: ", file.path(),
              " would be read as a text with all its syntax: write each document as a line of a .jsonl file, or "
              "give the name another ending if the syntax is the text.");
  check_no_other_format(file);
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
