// A file that is open for reading.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "twobp/core/json.h"

namespace twobp {

// Files are read, not mapped: a file that is truncated while it is mapped kills the process (SIGBUS).
class InputFile {
 public:
  // Throws Error if the file is missing, unreadable, or not a regular file. An empty file is allowed.
  explicit InputFile(std::string path);
  ~InputFile();
  InputFile(InputFile&& other) noexcept;
  InputFile& operator=(InputFile&& other) noexcept;
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::string& path() const { return path_; }
  size_t size() const { return size_; }  // when it was opened
  // Copies the `count` bytes from `offset` on, which must lie within size(). Any thread may call it. Throws
  // Error if the file has become shorter, or the disk fails.
  void read(size_t offset, void* to, size_t count) const;

 private:
  std::string path_;
  int fd_ = -1;
  size_t size_ = 0;
};

// The bytes of a whole file. Throws Error as InputFile does.
std::vector<uint8_t> read_whole_file(const std::string& path);

// Reads a file with a JSON object. Throws Error if it is missing, unreadable, larger than `max_bytes`, or as
// parse_json_object does.
nlohmann::json read_json_object(const std::string& path, int max_depth, uint64_t max_bytes = 16 << 20);

// File formats that are known by their first bytes: what users give by mistake in place of texts and tokens.
struct KnownFormat {
  std::string_view mark;       // the first bytes
  std::string_view is;         // "is a NumPy file"
  std::string_view as_tokens;  // what to do if it was given as tokens; empty: tokens may begin like this
  std::string_view as_text;    // the same for a text
};

// Null for a file of another format.
const KnownFormat* known_format(const InputFile& file);

}  // namespace twobp
