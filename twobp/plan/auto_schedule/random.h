// Internal to the auto-scheduler: random numbers that are the same on every platform. (The distributions of the
// standard library are not.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>

namespace twobp {

class SearchRandom {
 public:
  explicit SearchRandom(uint64_t seed) : engine_(seed) {}

  uint64_t next() { return engine_(); }
  size_t below(size_t count) { return static_cast<size_t>(engine_() % count); }
  double unit() { return static_cast<double>(engine_() >> 11U) * 0x1p-53; }  // [0, 1)

 private:
  std::mt19937_64 engine_;
};

}  // namespace twobp
