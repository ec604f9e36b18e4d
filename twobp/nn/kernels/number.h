// Numbers as they are stored and as they are computed with. Reduced precision is stored; computation is in float.
#pragma once

#include <bit>
#include <cstdint>

namespace twobp {

// The upper half of a float (1 sign, 8 exponent, 7 mantissa bits).
struct BFloat16 {
  uint16_t bits;
};
// IEEE 754 binary16.
struct Half {
  uint16_t bits;
};

template <typename Stored>
struct ComputeOf {
  using type = float;
};
template <>
struct ComputeOf<double> {
  using type = double;
};
// The type that a stored number is computed in.
template <typename Stored>
using Compute = typename ComputeOf<Stored>::type;

inline float load(float x) {
  return x;
}
inline double load(double x) {
  return x;
}
inline float load(BFloat16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}
inline float load(Half x) {
  return static_cast<float>(std::bit_cast<_Float16>(x.bits));
}

inline void store(float& to, float x) {
  to = x;
}
inline void store(double& to, double x) {
  to = x;
}
// Rounds to nearest, ties to even. Infinities and NaN are kept.
inline void store(BFloat16& to, float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to.bits = static_cast<uint16_t>(x == x ? rounded : 0x7fc0);
}
inline void store(Half& to, float x) {
  to.bits = std::bit_cast<uint16_t>(static_cast<_Float16>(x));
}

}  // namespace twobp
