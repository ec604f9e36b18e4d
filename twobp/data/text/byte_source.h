// Documents whose tokens are their bytes, in memory.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "twobp/data/text/token_source.h"

namespace twobp {

class ByteSource : public TokenSource {
 public:
  explicit ByteSource(std::string bytes) : bytes_(std::move(bytes)) {}

  std::string name() const override { return "data.text"; }
  int64_t tokens() const override { return static_cast<int64_t>(bytes_.size()); }
  void copy(int64_t begin, int64_t count, int64_t* to) const override {
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<unsigned char>(bytes_[static_cast<size_t>(begin + i)]);
  }
  std::string description() const override { return std::to_string(bytes_.size()) + " bytes in all"; }

 private:
  std::string bytes_;
};

}  // namespace twobp
