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

// The loops of gated linear units over rows (g | u), under the rules of vector_math.h.

namespace {

template <typename T>
struct GatedGradient {
  T gate;
  T up;
};

// act = open(g, u), for x (rows, 2 * cols) with rows `stride` numbers apart and act (rows, cols).
template <typename T, typename S, typename Open>
void gated_rows(const S* __restrict x, int64_t stride, S* __restrict act, int64_t rows, int64_t cols, Open open) {
  for (int64_t r = 0; r < rows; ++r, x += stride, act += cols) {
    const S* __restrict g = x;
    const S* __restrict u = x + cols;
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) store(act[c], open(T(load(g[c])), T(load(u[c]))));
  }
}

// (dg | du) = gradient(g, u, dact), a GatedGradient. dx may be x.
template <typename T, typename S, typename Gradient>
void gated_rows_backward(const S* x, int64_t stride, const S* __restrict dact, S* dx, int64_t dx_stride, int64_t rows,
                         int64_t cols, Gradient gradient) {
  for (int64_t r = 0; r < rows; ++r, x += stride, dx += dx_stride, dact += cols) {
    const S* g = x;
    const S* u = x + cols;
    S* dg = dx;
    S* du = dx + cols;
    // dg and du may overwrite g and u: no iteration reads what another writes.
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) {
      const GatedGradient<T> d = gradient(T(load(g[c])), T(load(u[c])), T(load(dact[c])));
      store(dg[c], d.gate);
      store(du[c], d.up);
    }
  }
}

}  // namespace

}  // namespace twobp
