#include "twobp/core/text.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "twobp/core/check.h"

namespace twobp {
namespace {

std::string formatted(const char* format, double value) {
  std::array<char, 64> buffer{};
  std::snprintf(buffer.data(), buffer.size(), format, value);
  return buffer.data();
}

int edit_distance(std::string_view a, std::string_view b) {
  std::vector<int> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    int diagonal = row[0];
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const int substitution = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substitution});
    }
  }
  return row[b.size()];
}

}  // namespace

std::string format_bytes(double bytes) {
  constexpr double kKibi = 1024.0;
  if (bytes < kKibi) return formatted("%.0f B", bytes);
  if (bytes < kKibi * kKibi) return formatted("%.1f KiB", bytes / kKibi);
  if (bytes < kKibi * kKibi * kKibi) return formatted("%.1f MiB", bytes / kKibi / kKibi);
  return formatted("%.2f GiB", bytes / kKibi / kKibi / kKibi);
}

std::string format_seconds(double seconds) {
  if (seconds < 1) return formatted("%.0fms", seconds * 1e3);
  if (seconds < 60) return formatted("%.1fs", seconds);
  const auto whole = static_cast<int64_t>(std::llround(seconds));
  std::array<char, 64> buffer{};
  if (whole < 3600) {
    std::snprintf(buffer.data(), buffer.size(), "%dm%02ds", static_cast<int>(whole / 60), static_cast<int>(whole % 60));
  } else {
    std::snprintf(buffer.data(), buffer.size(), "%lldh%02dm", static_cast<long long>(whole / 3600),
                  static_cast<int>(whole / 60 % 60));
  }
  return buffer.data();
}

std::string nearest(std::string_view name, const std::vector<std::string>& candidates) {
  std::string best;
  int best_distance = -1;
  for (const auto& candidate : candidates) {
    const int distance = edit_distance(name, candidate);
    if (best_distance < 0 || distance < best_distance) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

size_t index_of_name(std::string_view what, std::string_view name, const std::vector<std::string>& names) {
  const auto found = std::find(names.begin(), names.end(), name);
  TWOBP_CHECK(found != names.end(), "unknown ", what, " '", name, "': did you mean '", nearest(name, names),
              "'? There are ", join(names));
  return static_cast<size_t>(found - names.begin());
}

std::string join(const std::vector<std::string>& parts, std::string_view separator) {
  std::string out;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (i > 0) out += separator;
    out += parts[i];
  }
  return out;
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  size_t begin = 0;
  while (true) {
    const size_t end = text.find(separator, begin);
    parts.emplace_back(text.substr(begin, end - begin));
    if (end == std::string_view::npos) return parts;
    begin = end + 1;
  }
}

}  // namespace twobp
