// Code that the kernels' loops over a row share. It is for files that are compiled once per instruction set:
// everything here is local to the file, so that the linker cannot mix the copies.
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

// The largest number of a row. The search goes lane by lane, because the compiler does not vectorise a
// maximum over numbers that may be NaN.
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
