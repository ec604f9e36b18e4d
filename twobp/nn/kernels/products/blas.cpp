#include <cstdlib>

#include "twobp/nn/kernels/products/product_time.h"
#include "twobp/nn/kernels/products/products.h"

#if TWOBP_BLAS
// The Fortran interface of BLAS: column-major, everything by address.
extern "C" {
void sgemm_(const char* transpose_a, const char* transpose_b, const int* m, const int* n, const int* k,
            const float* alpha, const float* a, const int* lda, const float* b, const int* ldb, const float* beta,
            float* c, const int* ldc);
void dgemm_(const char* transpose_a, const char* transpose_b, const int* m, const int* n, const int* k,
            const double* alpha, const double* a, const int* lda, const double* b, const int* ldb, const double* beta,
            double* c, const int* ldc);
}
#else
#include <ATen/ATen.h>
#endif

namespace twobp {
namespace {

// On AMD's CPUs, MKL rounds small products differently at other addresses, unless it is asked for reproducible ones
// (oneMKL's developer guide, "Obtaining Numerically Reproducible Results"). It reads this at its first product.
[[maybe_unused]] const bool reproducible = ::setenv("MKL_CBWR", "AUTO", /*overwrite=*/0) == 0;

#if TWOBP_BLAS
inline void blas(const char* ta, const char* tb, const int* m, const int* n, const int* k, const float* alpha,
                 const float* a, const int* lda, const float* b, const int* ldb, const float* beta, float* c,
                 const int* ldc) {
  sgemm_(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
inline void blas(const char* ta, const char* tb, const int* m, const int* n, const int* k, const double* alpha,
                 const double* a, const int* lda, const double* b, const int* ldb, const double* beta, double* c,
                 const int* ldc) {
  dgemm_(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
#else
template <typename T>
at::Tensor view(const T* data, int64_t rows, int64_t cols, int64_t stride, bool transpose) {
  const at::Tensor whole = at::from_blob(const_cast<T*>(data), {transpose ? cols : rows, transpose ? rows : cols},
                                         {stride, 1}, at::TensorOptions().dtype(c10::CppTypeToScalarType<T>::value));
  return transpose ? whole.t() : whole;
}
#endif

}  // namespace

template <typename T>
void gemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, T alpha, Matrix<const T> a,
          Matrix<const T> b, T beta, Matrix<T> c) {
  const ProductTimer timer(m, n, k);
#if TWOBP_BLAS
  // A row-major matrix is its transpose in column-major: c^T = op(b)^T op(a)^T.
  const int rows = static_cast<int>(n), cols = static_cast<int>(m), inner = static_cast<int>(k);
  const int lda = static_cast<int>(a.stride), ldb = static_cast<int>(b.stride), ldc = static_cast<int>(c.stride);
  blas(transpose_b ? "T" : "N", transpose_a ? "T" : "N", &rows, &cols, &inner, &alpha, b.data, &ldb, a.data, &lda,
       &beta, c.data, &ldc);
#else
  at::Tensor out = view<T>(c.data, m, n, c.stride, false);
  at::addmm_out(out, out, view(a.data, m, k, a.stride, transpose_a), view(b.data, k, n, b.stride, transpose_b), beta,
                alpha);
#endif
}

template void gemm<float>(bool, bool, int64_t, int64_t, int64_t, float, Matrix<const float>, Matrix<const float>, float,
                          Matrix<float>);
template void gemm<double>(bool, bool, int64_t, int64_t, int64_t, double, Matrix<const double>, Matrix<const double>,
                           double, Matrix<double>);

}  // namespace twobp
