#include "twobp/core/json_text.h"

#include <set>
#include <vector>

#include "twobp/core/check.h"

namespace twobp {
namespace {

// The library's own message, without its tag and without quoting a whole file.
std::string reason(const nlohmann::json::exception& error) {
  constexpr size_t kLongest = 200;
  std::string what = error.what();
  const size_t tag = what.find("] ");
  if (tag != std::string::npos) what = what.substr(tag + 2);
  return what.size() <= kLongest ? what : what.substr(0, kLongest) + "...";
}

}  // namespace

template <typename Json>
Json parse_json(std::string_view text, const std::string& origin, int max_depth) {
  using Event = typename Json::parse_event_t;
  std::vector<std::set<std::string>> open;  // the keys of the objects that are still open
  const auto check = [&](int depth, Event event, Json& parsed) {
    TWOBP_CHECK(depth <= max_depth, origin, ": nested deeper than ", max_depth, " levels");
    if (event == Event::object_start) open.emplace_back();
    if (event == Event::object_end) open.pop_back();
    if (event == Event::key) {
      const auto& name = parsed.template get_ref<const std::string&>();
      TWOBP_CHECK(open.back().insert(name).second, origin, ": \"", name.substr(0, 100), "\" is there twice");
    }
    return true;
  };
  try {
    return Json::parse(text.begin(), text.end(), check);
  } catch (const nlohmann::json::exception& error) {
    fail(origin, ": not JSON: ", reason(error));
  }
}

template nlohmann::json parse_json(std::string_view text, const std::string& origin, int max_depth);
template nlohmann::ordered_json parse_json(std::string_view text, const std::string& origin, int max_depth);

}  // namespace twobp
