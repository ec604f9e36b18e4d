#include "twobp/files/json_file.h"

#include "twobp/core/check.h"
#include "twobp/core/json_text.h"
#include "twobp/files/input_file.h"

namespace twobp {

using nlohmann::json;

template <typename Json>
Json parse_json_object(std::string_view text, const std::string& origin, int max_depth) {
  Json root = parse_json<Json>(text, origin, max_depth);
  TWOBP_CHECK(root.is_object(), origin, ": not a JSON object");
  return root;
}

template json parse_json_object(std::string_view text, const std::string& origin, int max_depth);
template nlohmann::ordered_json parse_json_object(std::string_view text, const std::string& origin, int max_depth);

json read_json_object(const std::string& path, int max_depth, uint64_t max_bytes) {
  const InputFile file(path);
  TWOBP_CHECK(file.size() <= max_bytes, path, ": ", file.size(), " bytes, more than the ", max_bytes,
              " that such a file may have");
  std::string text(file.size(), '\0');
  file.read(0, text.data(), text.size());
  return parse_json_object(text, path, max_depth);
}

}  // namespace twobp
