#include "twobp/core/text_file.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "twobp/core/check.h"

namespace twobp {

std::string read_text(const std::string& path, uint64_t max_bytes) {
  std::error_code error;
  TWOBP_CHECK(!std::filesystem::is_directory(path, error), path, ": is a folder, not a file");
  std::ifstream file(path, std::ios::binary);
  TWOBP_CHECK(file.good(), "cannot read ", path, ": ", std::strerror(errno));
  constexpr size_t kBlock = size_t{1} << 20U;
  std::string text;
  while (file.good() && text.size() <= max_bytes) {  // a file may be endless, or may not know its size
    const size_t begin = text.size();
    text.resize(begin + kBlock);
    file.read(text.data() + begin, kBlock);
    text.resize(begin + static_cast<size_t>(file.gcount()));
  }
  TWOBP_CHECK(!file.bad(), "cannot read ", path, ": ", std::strerror(errno));
  TWOBP_CHECK(text.size() <= max_bytes, path, ": longer than the ", max_bytes,
              " bytes that such a file may have");
  return text;
}

void write_text(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.flush();
  TWOBP_CHECK(file.good(), "cannot write ", path, ": ", std::strerror(errno));
}

}  // namespace twobp
