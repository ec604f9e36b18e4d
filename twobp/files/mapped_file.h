// A whole file mapped into memory for reading.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace twobp {

class MappedFile {
 public:
  // Throws Error if the file is missing, unreadable, or not a regular file. An empty file is allowed and maps
  // nothing.
  explicit MappedFile(std::string path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  // The start lies on a page boundary. The span must not outlive the object.
  std::span<const uint8_t> bytes() const { return {data_, size_}; }

 private:
  void unmap() noexcept;

  std::string path_;
  const uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace twobp
