// A file that is open for reading.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

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
  // Copies the `count` bytes from `offset` on, which must lie within size(). Any thread may call it. Throws Error if
  // the file has become shorter, or the disk fails.
  void read(size_t offset, void* to, size_t count) const;

 private:
  std::string path_;
  int fd_ = -1;
  size_t size_ = 0;
};

// The bytes of a whole file. Throws Error as InputFile does.
std::vector<uint8_t> read_whole_file(const std::string& path);

}  // namespace twobp
