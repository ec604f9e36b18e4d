// The tests of this folder share these helpers: a folder that is removed at the end, a temporary environment, a file's
// content, and handmade .npy files.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include "tests/expect_error.h"

namespace twobp::test {

class TempFolder {
 public:
  TempFolder() {
    std::string path = (std::filesystem::temp_directory_path() / "twobp_test_XXXXXX").string();
    if (::mkdtemp(path.data()) == nullptr) throw std::runtime_error("cannot make a temporary folder");
    path_ = path;
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  std::string path(const std::string& name) const { return (path_ / name).string(); }

  // Returns the file's path.
  std::string write(const std::string& name, const std::string& content) const {
    // Each call makes a new file. An overwritten file may be mapped, and some file systems flush it to disk.
    std::filesystem::remove(path(name));
    std::ofstream file(path(name), std::ios::binary);
    file << content;
    file.close();
    if (!file) throw std::runtime_error("cannot write " + path(name));
    return path(name);
  }

 private:
  std::filesystem::path path_;
};

// Sets an environment variable while this object lives.
class Environment {
 public:
  Environment(const char* name, const std::string& value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old;
    ::setenv(name, value.c_str(), 1);
  }
  ~Environment() {
    if (old_) {
      ::setenv(name_, old_->c_str(), 1);
    } else {
      ::unsetenv(name_);
    }
  }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  const char* name_;
  std::optional<std::string> old_;
};

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Returns the bytes before the elements, as numpy.save writes them. `header_length` gives a wrong length if it is not
// -1.
inline std::string npy_prefix(std::string dict, int major = 1, int64_t header_length = -1) {
  const size_t length_bytes = major == 1 ? 2 : 4;
  while ((8 + length_bytes + dict.size() + 1) % 64 != 0) dict += ' ';
  dict += '\n';
  const auto length = header_length < 0 ? static_cast<uint64_t>(dict.size()) : static_cast<uint64_t>(header_length);
  std::string out = "\x93NUMPY";
  out += static_cast<char>(major);
  out += '\0';
  for (size_t i = 0; i < length_bytes; ++i) out += static_cast<char>(length >> (8 * i) & 0xff);
  return out + dict;
}

inline std::string npy_dict(const std::string& descr, const std::string& shape, bool fortran_order = false) {
  return "{'descr': '" + descr + "', 'fortran_order': " + (fortran_order ? "True" : "False") + ", 'shape': " + shape +
         ", }";
}

template <typename T>
std::string raw_bytes(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// Returns a whole .npy file. `shape` is as Python writes it.
template <typename T>
std::string npy_file(const std::string& descr, const std::string& shape, const std::vector<T>& values, int major = 1) {
  return npy_prefix(npy_dict(descr, shape), major) + raw_bytes(values);
}

}  // namespace twobp::test
