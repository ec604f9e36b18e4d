// NumPy's .npy files, memory-mapped: little-endian, C order, one of the types below, format 1.0 to 3.0. The
// file is untrusted: its header, lengths, type, shape and size are all checked before anything is read.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/files/mapped_file.h"

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

  // Calls `function` with a pointer to the first of elements() values, of the array's type.
  template <typename Function>
  decltype(auto) visit(Function&& function) const {
    switch (type_) {
      case NpyType::kUInt8:
        return function(pointer<uint8_t>());
      case NpyType::kUInt16:
        return function(pointer<uint16_t>());
      case NpyType::kInt32:
        return function(pointer<int32_t>());
      case NpyType::kInt64:
        return function(pointer<int64_t>());
      case NpyType::kFloat32:
        return function(pointer<float>());
    }
    fail(path(), ": unknown element type.");
  }

 private:
  // The pointer is aligned: the mapping starts at a page, and the constructor checks the offset.
  template <typename T>
  const T* pointer() const {
    return reinterpret_cast<const T*>(file_.bytes().data() + offset_);
  }

  MappedFile file_;
  NpyType type_ = NpyType::kUInt8;
  std::vector<int64_t> shape_;
  int64_t elements_ = 0;
  size_t offset_ = 0;  // of the first element within the file
};

// "(3, 256)".
std::string shape_text(const std::vector<int64_t>& shape);

}  // namespace twobp
