// Code that fuzz targets share: the rule that a reader may refuse an input only with twobp::Error, and inputs as files
// and folders. Any other exception leaves the target and ends the program, so it is found.
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

inline constexpr size_t kLongestMessage = 16 << 10;  // a longer message quotes the whole file

// Returns the result of read(), or nothing if it refuses the input.
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

// Ends the program unless `holds` is true. For properties of everything that a reader accepts.
inline void require(bool holds, const char* what) {
  if (!holds) throw std::logic_error(what);
}

inline std::string text(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

// Splits the input into `count` files, separated by a line "%%". Missing files are empty.
std::vector<std::string_view> parts(const uint8_t* data, size_t size, size_t count);

// A file in memory. It is rewritten for each input.
class File {
 public:
  File();
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  // Writes the content and returns the file's path.
  const std::string& holding(std::string_view content);
  const std::string& holding(const uint8_t* data, size_t size);

 private:
  int fd_ = -1;
  std::string path_;
};

// A folder in memory (under /dev/shm if it exists). It is removed at the end.
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

// The function that libFuzzer or replay.cpp calls with each input.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
