// Random integers and hashes that are the same with every compiler and library.
#pragma once

#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>
#include <string_view>

namespace twobp {

// SplitMix64 (Steele, Lea, Flood 2014): maps a 64-bit word to another that looks independent of it.
inline uint64_t mix_bits(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// A different seed for each (seed, index).
inline uint64_t mix_bits(uint64_t seed, uint64_t index) {
  return mix_bits(mix_bits(seed) ^ index);
}

// SplitMix64 as a generator. It costs nothing to start, so every sample can have its own.
class SplitMix64 {
 public:
  explicit SplitMix64(uint64_t seed) : state_(seed) {}
  uint64_t operator()() {
    const uint64_t word = mix_bits(state_);
    state_ += 0x9e3779b97f4a7c15;
    return word;
  }

 private:
  uint64_t state_;
};

// Uniform in [0, bound), bound >= 1, from a generator of full 64-bit words. Words from the last whole multiple of
// `bound` on are drawn again, so all values are equally likely.
template <typename Engine>
uint64_t bounded(Engine& engine, uint64_t bound) {
  const uint64_t rest = (std::numeric_limits<uint64_t>::max() % bound + 1) % bound;
  const uint64_t last = std::numeric_limits<uint64_t>::max() - rest;
  uint64_t word = engine();
  while (word > last) word = engine();
  return word % bound;
}

// FNV-1a (Fowler, Noll, Vo): the same on every platform. It detects accidental changes, not malicious ones.
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
