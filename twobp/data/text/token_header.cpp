#include "twobp/data/text/token_header.h"

#include <array>

#include "twobp/core/check.h"
#include "twobp/files/known_format.h"

namespace twobp {
namespace {

struct Format {
  int32_t mark;
  int32_t version;
  TokenType type;
};
constexpr std::array<Format, 2> kFormats = {{{20240520, 1, TokenType::kUInt16}, {20240801, 7, TokenType::kUInt32}}};

constexpr int32_t kChoicesMark = 20240522;  // questions with several answers, such as HellaSwag

}  // namespace

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

}  // namespace twobp
