// Code that the kernels' loops over a row share. It is for files that are compiled once per instruction set: everything
// here is local to the file, so that the linker cannot mix the copies.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "twobp/nn/kernels/number.h"

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
// libmvec has vector versions of these functions (within 4 ulp). The attribute lets the compiler use them.
extern "C" {
__attribute__((__simd__("notinbranch"))) float expf(float) noexcept;
__attribute__((__simd__("notinbranch"))) double exp(double) noexcept;
#if __GLIBC_PREREQ(2, 35)
__attribute__((__simd__("notinbranch"))) double erf(double) noexcept;
__attribute__((__simd__("notinbranch"))) double tanh(double) noexcept;
#endif
}
#endif

namespace twobp {
namespace {

inline float exponential(float x) {
  return ::expf(x);
}
inline double exponential(double x) {
  return ::exp(x);
}

// tanh. In float by exp, and by its power series (to x^9; the rest is below 2e-8 of x) where that cancels.
inline float hyperbolic_tangent(float x) {
  const float a = std::fabs(x);
  const float square = x * x;
  const float series =
      x + x * square * (-1.f / 3 + square * (2.f / 15 + square * (-17.f / 315 + square * (62.f / 2835))));
  const float large = std::copysign(1 - 2 / (exponential(2 * a) + 1), x);
  return a < 0.25f ? series : large;
}
inline double hyperbolic_tangent(double x) {
  return ::tanh(x);
}

// The largest number of a row. The search goes lane by lane, because the compiler does not vectorise a maximum over
// numbers that may be NaN.
template <typename S, typename T = Compute<S>>
inline T largest_of(const S* __restrict row, int64_t cols) {
  constexpr int64_t kLanes = 32;
  T lanes[kLanes];
  std::fill_n(lanes, kLanes, load(row[0]));
  int64_t c = 0;
  for (; c + kLanes <= cols; c += kLanes) {
#pragma omp simd
    for (int64_t i = 0; i < kLanes; ++i) {
      const T x = load(row[c + i]);
      lanes[i] = lanes[i] < x ? x : lanes[i];
    }
  }
  for (; c < cols; ++c) lanes[0] = std::max(lanes[0], load(row[c]));
  T largest = lanes[0];
  for (const T lane : lanes) largest = std::max(largest, lane);
  return largest;
}

}  // namespace
}  // namespace twobp
