// The loops of gated linear units over rows (g | u), under the rules of vector_math.h.
#pragma once

#include <cstdint>

#include "twobp/nn/kernels/number.h"

namespace twobp {
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
