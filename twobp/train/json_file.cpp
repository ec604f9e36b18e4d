#include "twobp/train/json_file.h"

#include <set>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/train/mapped_file.h"

namespace twobp {
namespace {

using nlohmann::json;

// The library's own message without its tag, and not with a whole file quoted in it.
std::string reason(const json::exception& error) {
  constexpr size_t kLongest = 200;
  std::string what = error.what();
  const size_t tag = what.find("] ");
  if (tag != std::string::npos) what = what.substr(tag + 2);
  return what.size() <= kLongest ? what : what.substr(0, kLongest) + "...";
}

}  // namespace

json parse_json_object(std::string_view text, const std::string& origin, int max_depth) {
  std::vector<std::set<std::string>> open;  // the keys of the objects that are not closed yet
  const auto check = [&](int depth, json::parse_event_t event, json& parsed) {
    TWOBP_CHECK(depth <= max_depth, origin, ": nested deeper than ", max_depth, " levels");
    if (event == json::parse_event_t::object_start) open.emplace_back();
    if (event == json::parse_event_t::object_end) open.pop_back();
    if (event == json::parse_event_t::key) {
      const auto& name = parsed.get_ref<const std::string&>();
      TWOBP_CHECK(open.back().insert(name).second, origin, ": \"", name.substr(0, 100), "\" is there twice");
    }
    return true;
  };
  try {
    json root = json::parse(text.begin(), text.end(), check);
    TWOBP_CHECK(root.is_object(), origin, ": not a JSON object");
    return root;
  } catch (const json::exception& error) {
    fail(origin, ": not JSON: ", reason(error));
  }
}

json read_json_object(const std::string& path, int max_depth, uint64_t max_bytes) {
  const MappedFile file(path);
  const auto bytes = file.bytes();
  TWOBP_CHECK(bytes.size() <= max_bytes, path, ": ", bytes.size(), " bytes, more than the ", max_bytes,
              " that such a file may have");
  return parse_json_object({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, path, max_depth);
}

}  // namespace twobp
