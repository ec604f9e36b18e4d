#include "twobp/files/json_file.h"

#include "twobp/core/check.h"
#include "twobp/core/json_text.h"
#include "twobp/files/mapped_file.h"

namespace twobp {

using nlohmann::json;

json parse_json_object(std::string_view text, const std::string& origin, int max_depth) {
  json root = parse_json<json>(text, origin, max_depth);
  TWOBP_CHECK(root.is_object(), origin, ": not a JSON object");
  return root;
}

json read_json_object(const std::string& path, int max_depth, uint64_t max_bytes) {
  const MappedFile file(path);
  const auto bytes = file.bytes();
  TWOBP_CHECK(bytes.size() <= max_bytes, path, ": ", bytes.size(), " bytes, more than the ", max_bytes,
              " that such a file may have");
  return parse_json_object({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, path, max_depth);
}

}  // namespace twobp
