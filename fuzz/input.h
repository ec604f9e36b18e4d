// What fuzz targets share: the rule that twobp::Error alone refuses an input, and inputs as files and
// folders. Anything else that a reader throws leaves the target and ends the program, which is how it is
// found.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "twobp/core/check.h"

namespace twobp::fuzz {

inline constexpr size_t kLongestMessage = 16
                                          << 10;  // a message that quotes the file as a whole is no message

// What read() returns, nothing if it refuses the input.
template <typename Read>
auto accepted(Read&& read) -> std::optional<decltype(read())> {
  try {
    return read();
  } catch (const Error& error) {
    const size_t length = std::string_view(error.what()).size();
    if (length == 0 || length > kLongestMessage) throw std::logic_error("an error without a usable message");
  }
  return std::nullopt;
}

// Ends the program unless `holds`: for what must be true of everything that a reader accepts.
inline void require(bool holds, const char* what) {
  if (!holds) throw std::logic_error(what);
}

inline std::string text(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

// The input as `count` files: parts are separated by a line "%%"; those that are not there are empty.
std::vector<std::string_view> parts(const uint8_t* data, size_t size, size_t count);

// A file in memory, written anew for each input.
class File {
 public:
  File();
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  // Its path, with that content.
  const std::string& holding(std::string_view content);
  const std::string& holding(const uint8_t* data, size_t size);

 private:
  int fd_ = -1;
  std::string path_;
};

// A folder in memory (under /dev/shm where there is one), removed at the end.
class Folder {
 public:
  Folder();
  ~Folder();
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string path() const { return path_.string(); }
  std::string path(const std::string& name) const { return (path_ / name).string(); }
  void write(const std::string& name, std::string_view content) const;
  void remove(const std::string& name) const;

 private:
  std::filesystem::path path_;
};

}  // namespace twobp::fuzz

// What libFuzzer, and replay.cpp in its stead, calls with each input.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
