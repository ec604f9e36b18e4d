// This file makes safetensors files and Hugging Face directories by hand, for the tests of their readers.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "tests/train/helpers.h"
#include "twobp/core/text.h"

namespace twobp::test {

// `header_length` gives a wrong length if it is not -1.
inline std::string safetensors_file(const std::string& header, const std::string& data, int64_t header_length = -1) {
  const uint64_t length = header_length < 0 ? header.size() : static_cast<uint64_t>(header_length);
  std::string out(sizeof(length), '\0');
  std::memcpy(out.data(), &length, sizeof(length));
  return out + header + data;
}

inline std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                         const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
}

inline std::string header(const std::vector<std::string>& entries) {
  return concat('{', join(entries, ","), '}');
}

}  // namespace twobp::test
