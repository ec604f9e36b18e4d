#include "twobp/core/text.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <iomanip>
#include <optional>
#include <regex.h>
#include <sstream>
#include <sys/stat.h>
#include <unistd.h>

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

Character first_character(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  const size_t bytes = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < bytes) return {};
  uint32_t code = lead & (0xffU >> (bytes + 1));
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {};
    code = code << 6 | (byte(i) & 0x3f);
  }
  constexpr std::array<uint32_t, 5> kLeast = {0, 0, 0x80, 0x800, 0x10000};
  if (code < kLeast[bytes] || (code >= 0xd800 && code <= 0xdfff) || code > 0x10ffff) return {};
  return {code, bytes};
}

namespace {

bool is_control(uint32_t code) {
  return code < 0x20 || (code >= 0x7f && code <= 0x9f) ||  // C0, DEL, C1
         code == 0x61c || code == 0x200e || code == 0x200f || (code >= 0x202a && code <= 0x202e) ||
         (code >= 0x2066 && code <= 0x2069) ||  // direction
         code == 0x2028 || code == 0x2029;      // line and paragraph
}

std::string escape(uint32_t code) {
  if (code == '\n') return "\\n";
  if (code == '\t') return "\\t";
  if (code == '\r') return "\\r";
  std::array<char, 16> text{};
  std::snprintf(text.data(), text.size(), code < 0x80 ? "\\x%02x" : "\\u{%x}", code);
  return text.data();
}

std::string escaped(std::string_view text, bool lines) {
  std::string out;
  while (!text.empty()) {
    const Character character = first_character(text);
    if (character.bytes == 0) {
      std::array<char, 8> byte{};
      std::snprintf(byte.data(), byte.size(), "\\x%02x", static_cast<unsigned char>(text[0]));
      out += byte.data();
      text.remove_prefix(1);
      continue;
    }
    const bool stays = lines && (character.code == '\n' || character.code == '\t');
    if (is_control(character.code) && !stays) {
      out += escape(character.code);
    } else {
      out += text.substr(0, character.bytes);
    }
    text.remove_prefix(character.bytes);
  }
  return out;
}

}  // namespace

std::string printable(std::string_view text) {
  return escaped(text, false);
}

std::string printable_lines(std::string_view text) {
  return escaped(text, true);
}

struct Pattern::Compiled {
  explicit Compiled(const std::string& expression) {
    const int code = regcomp(&regex, ("^(" + expression + ")$").c_str(), REG_EXTENDED);
    TWOBP_CHECK(code == 0, "'", expression, "' is not a regular expression");
  }
  ~Compiled() { regfree(&regex); }
  Compiled(const Compiled&) = delete;
  Compiled& operator=(const Compiled&) = delete;

  regex_t regex;
};

Pattern::Pattern(const std::string& expression) : compiled_(std::make_shared<Compiled>(expression)) {}

std::vector<std::string> Pattern::match(const std::string& text) const {
  if (text.find('\0') != std::string::npos) return {};
  std::vector<regmatch_t> places(compiled_->regex.re_nsub + 1);
  if (regexec(&compiled_->regex, text.c_str(), places.size(), places.data(), 0) != 0) return {};
  std::vector<std::string> groups;
  for (size_t i = 1; i < places.size(); ++i) {  // the first group is the whole
    const auto& [begin, end] = places[i];
    groups.push_back(begin < 0 ? "" : text.substr(begin, end - begin));
  }
  return groups;
}

std::string number(double value) {
  std::ostringstream out;
  out << std::setprecision(5) << value;
  return out.str();
}

std::string fixed(double value, int digits) {
  if (std::isnan(value)) return "-";
  std::ostringstream out;
  out << std::fixed << std::setprecision(digits) << value;
  const std::string text = out.str();
  const bool zero = text.find_first_of("123456789") == std::string::npos && std::isfinite(value);
  return zero && text.front() == '-' ? text.substr(1) : text;  // no "-0.0"
}

std::string percent(double fraction) {
  return fixed(100 * fraction, 1) + " %";
}

std::string milliseconds(double seconds) {
  return fixed(1e3 * seconds, seconds < 0.01 ? 3 : 1) + " ms";
}

namespace {

// Closes the file in any case.
class OpenFile {
 public:
  // Without O_NONBLOCK, opening a named pipe would wait for a writer.
  explicit OpenFile(const std::string& path)
      : path_(path), fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
    check(fd_ >= 0);
  }
  ~OpenFile() {
    if (fd_ >= 0) ::close(fd_);
  }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  // The size of a regular file. None for a stream that this program was given: /dev/stdin, or <(...) of a shell, which
  // is /dev/fd/N. Throws Error for anything else: it may never end, or never begin.
  std::optional<uint64_t> size() const {
    struct stat status {};
    check(::fstat(fd_, &status) == 0);
    if (S_ISREG(status.st_mode)) return static_cast<uint64_t>(status.st_size);
    TWOBP_CHECK(!S_ISDIR(status.st_mode), path_, ": is a folder, not a file");
    TWOBP_CHECK(path_.starts_with("/dev/"), path_, ": is a pipe, a socket or a device, not a file");
    check(::fcntl(fd_, F_SETFL, ::fcntl(fd_, F_GETFL) & ~O_NONBLOCK) == 0);
    return std::nullopt;
  }
  // 0 at the end.
  size_t read(char* to, size_t most) const {
    while (true) {
      const ssize_t got = ::read(fd_, to, most);
      if (got < 0 && errno == EINTR) continue;
      check(got >= 0);
      return static_cast<size_t>(got);
    }
  }

 private:
  void check(bool ok) const { TWOBP_CHECK(ok, "cannot read ", path_, ": ", std::strerror(errno)); }

  const std::string& path_;
  int fd_;
};

}  // namespace

std::string read_text(const std::string& path, uint64_t max_bytes) {
  const OpenFile file(path);
  const std::optional<uint64_t> size = file.size();
  const auto check_length = [&](uint64_t bytes) {
    TWOBP_CHECK(bytes <= max_bytes, path, ": longer than the ", max_bytes, " bytes that such a file may have");
  };
  if (size) check_length(*size);
  constexpr size_t kBlock = size_t{1} << 20U;
  std::string text;
  while (true) {  // a file may be endless, or may not know its size
    const size_t begin = text.size();
    text.resize(begin + kBlock);
    const size_t got = file.read(text.data() + begin, kBlock);
    text.resize(begin + got);
    check_length(text.size());
    if (got == 0) return text;
  }
}

void write_text(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.flush();
  TWOBP_CHECK(file.good(), "cannot write ", path, ": ", std::strerror(errno));
}

}  // namespace twobp
