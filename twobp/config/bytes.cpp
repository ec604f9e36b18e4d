#include "twobp/config/bytes.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <system_error>
#include <utility>
#include <vector>

namespace twobp {

int64_t parse_bytes(const std::string& text) {
  static const std::vector<std::pair<std::string, double>> units = {
      {"", 1},     {"B", 1},    {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40},
      {"kB", 1e3}, {"KB", 1e3}, {"MB", 1e6},     {"GB", 1e9},     {"TB", 1e12}};
  double number = 0;
  const char* end = text.data() + text.size();
  const auto [rest, status] = std::from_chars(text.data(), end, number, std::chars_format::fixed);
  size_t unit_at = static_cast<size_t>(rest - text.data());
  while (unit_at < text.size() && text[unit_at] == ' ') ++unit_at;
  const auto unit = std::find_if(units.begin(), units.end(), [&](const auto& candidate) {
    return text.compare(unit_at, std::string::npos, candidate.first) == 0;
  });
  const bool parsed = status == std::errc() && std::isfinite(number) && number >= 0 && unit != units.end();
  const double bytes = parsed ? std::floor(number * unit->second) : -1;
  // Less than a byte would round to 0, which may have the opposite meaning.
  if (!parsed || bytes >= 0x1p63 || (bytes == 0 && number > 0)) return -1;
  return static_cast<int64_t>(bytes);
}

}  // namespace twobp
