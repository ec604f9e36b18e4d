// Matrix products: the choice between ATen's, the BLAS and oneDNN inside LibTorch.
#pragma once

#include <cstdint>

#include <ATen/ATen.h>

namespace twobp {

// Whether this CPU multiplies numbers of this dtype without widening them first. Always true for float32 and float64.
bool has_instructions_for(at::ScalarType dtype);

// The dtype in which matrix products of `dtype` are computed on this CPU: `dtype` itself or float32.
at::ScalarType product_type(at::ScalarType dtype);
// The dtype for products with this tensor: as above on a CPU, the tensor's own on a GPU.
at::ScalarType product_type(const at::Tensor& tensor);

// y = a @ b: a (rows, n), b (n, cols), y (rows, cols).
void multiply_into(at::Tensor& y, const at::Tensor& a, const at::Tensor& b);
// y = a @ b + row: `row` (cols) has y's dtype, or float32 if y has reduced precision.
void multiply_and_add(at::Tensor& y, const at::Tensor& a, const at::Tensor& b, const at::Tensor& row);
// y = y + scale a @ b.
void multiply_add(at::Tensor& y, const at::Tensor& a, const at::Tensor& b, double scale = 1);
// y = a @ b, or y + a @ b, where y may be wider than a and b: a gradient in float32. On a CPU, the product is rounded
// to their dtype at most once, on a GPU not at all.
void write_product(at::Tensor y, const at::Tensor& a, const at::Tensor& b, bool adds = false);

// Small matrix products inside kernels, on raw pointers. They call the BLAS inside LibTorch if possible, because a call
// through ATen costs as much as a product of 32 x 32.

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

// oneDNN's matrix product inside LibTorch. ATen gives float32 products to MKL, which reserves its AVX-512 code for
// Intel's CPUs. On AMD's CPUs with AVX-512 (Zen 4 on), oneDNN is faster. The choice of the library follows from the CPU
// and the shapes alone, so that runs agree to the bit.

// Whether oneDNN computes large float32 products on this CPU: true for AMD's CPUs with AVX-512.
bool one_dnn_multiplies();

// For tests: while it lives, oneDNN (true) or MKL (false) multiplies, on any CPU with AVX-512. Without that, or without
// oneDNN in LibTorch, it is always MKL. Not while other threads multiply.
class OneDnnForced {
 public:
  explicit OneDnnForced(bool multiplies);
  ~OneDnnForced();
  OneDnnForced(const OneDnnForced&) = delete;
  OneDnnForced& operator=(const OneDnnForced&) = delete;
};

// Whether oneDNN computes y = beta y + alpha a @ b faster. This holds on such a CPU, in float32, for dense matrices (a
// and b transposed or not) that are large enough to repay the cost of a call.
bool one_dnn_is_faster(const at::Tensor& y, const at::Tensor& a, const at::Tensor& b);

// y = beta y + alpha a @ b: a (rows, n), b (n, cols), y (rows, cols). With beta 0, y is only written.
void one_dnn_product(at::Tensor& y, const at::Tensor& a, const at::Tensor& b, float beta, float alpha);

}  // namespace twobp
