// Small matrix products inside kernels, on raw pointers. They call the BLAS inside LibTorch if possible, because a call
// through ATen costs as much as a product of 32 x 32.
#pragma once

#include <cstdint>

namespace twobp {

// A row-major matrix within a larger one. Consecutive rows are `stride` numbers apart.
template <typename T>
struct Matrix {
  T* data;
  int64_t stride;
};

// c (m, n) = alpha * op(a) (m, k) @ op(b) (k, n) + beta * c, op(x) = x or x^T. With beta 0, c is only written.
template <typename T>
void gemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, T alpha, Matrix<const T> a,
          Matrix<const T> b, T beta, Matrix<T> c);

}  // namespace twobp
