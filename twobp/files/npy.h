// NumPy's .npy files: little-endian, C order, one of the types below, format 1.0 to 3.0. The
// file is untrusted: its header, lengths, type, shape and size are all checked before anything is read.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/files/input_file.h"

namespace twobp {

enum class NpyType : uint8_t { kUInt8, kUInt16, kInt32, kInt64, kFloat32 };
std::string npy_type_name(NpyType type);  // "uint8", as NumPy names it

class NpyArray {
 public:
  // Throws Error that names the file and says what is wrong with it.
  explicit NpyArray(const std::string& path);

  const std::string& path() const { return file_.path(); }
  NpyType type() const { return type_; }
  const std::vector<int64_t>& shape() const { return shape_; }  // empty for a scalar
  int64_t elements() const { return elements_; }

  // Reads `count` elements from element `first` on, and calls `function` with a pointer to them, of the array's type.
  // The pointer is valid during the call. Throws Error as InputFile::read does.
  template <typename Function>
  decltype(auto) visit(int64_t first, int64_t count, Function&& function) const {
    switch (type_) {
      case NpyType::kUInt8:
        return function(elements<uint8_t>(first, count).get());
      case NpyType::kUInt16:
        return function(elements<uint16_t>(first, count).get());
      case NpyType::kInt32:
        return function(elements<int32_t>(first, count).get());
      case NpyType::kInt64:
        return function(elements<int64_t>(first, count).get());
      case NpyType::kFloat32:
        return function(elements<float>(first, count).get());
    }
    fail(path(), ": unknown element type.");
  }

 private:
  template <typename T>
  std::unique_ptr<const T[]> elements(int64_t first, int64_t count) const {
    auto values = std::make_unique_for_overwrite<T[]>(static_cast<size_t>(count));
    file_.read(offset_ + static_cast<size_t>(first) * sizeof(T), values.get(), static_cast<size_t>(count) * sizeof(T));
    return values;
  }

  InputFile file_;
  NpyType type_ = NpyType::kUInt8;
  std::vector<int64_t> shape_;
  int64_t elements_ = 0;
  size_t offset_ = 0;  // of the first element within the file
};

// "(3, 256)".
std::string shape_text(const std::vector<int64_t>& shape);

}  // namespace twobp
