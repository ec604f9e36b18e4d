// FNV-1a (Fowler, Noll, Vo): the same on every platform. It detects accidental changes, not malicious ones.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

namespace twobp {

class Hash {
 public:
  Hash& add(std::string_view bytes) {
    for (const char byte : bytes) hash_ = (hash_ ^ static_cast<unsigned char>(byte)) * 1099511628211ull;
    return *this;
  }
  Hash& add(int64_t number) { return add(std::to_string(number) + ","); }
  uint64_t value() const { return hash_; }
  std::string text() const {
    char out[17];
    std::snprintf(out, sizeof(out), "%016llx", static_cast<unsigned long long>(hash_));
    return out;
  }

 private:
  uint64_t hash_ = 14695981039346656037ull;
};

}  // namespace twobp
