// The kernels of kernels.h, compiled once per instruction set (TWOBP_ISA names it). Plain loops that the
// compiler vectorises; exp goes to glibc's vector math where there is one.
#include <algorithm>
#include <cmath>

#include "twobp/nn/kernels/kernels.h"

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
// libmvec has vector versions of these (within 4 ulp); the attribute lets the compiler use them.
extern "C" {
__attribute__((__simd__("notinbranch"))) float expf(float) noexcept;
__attribute__((__simd__("notinbranch"))) double exp(double) noexcept;
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

template <typename T>
inline T sigmoid(T x) {
  return T(1) / (T(1) + exponential(-x));
}

template <typename T>
void rms_norm_forward(const T* __restrict x, const T* __restrict gain, T* __restrict y, T* __restrict rstd,
                      int64_t rows, int64_t cols, double eps) {
  for (int64_t r = 0; r < rows; ++r, x += cols, y += cols) {
    T sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < cols; ++c) sum += x[c] * x[c];
    const T scale = T(1) / std::sqrt(sum / T(cols) + T(eps));
    rstd[r] = scale;
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) y[c] = x[c] * scale * gain[c];
  }
}

template <typename T>
void rms_norm_backward(const T* dy, const T* x, const T* __restrict gain, const T* __restrict rstd, T* dx,
                       T* __restrict dgain, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; ++r, x += cols, dy += cols, dx += cols) {
    const T scale = rstd[r];
    T dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t c = 0; c < cols; ++c) {
      const T product = dy[c] * x[c] * scale;
      dgain[c] += product;
      dot += product * gain[c];
    }
    const T mean = dot / T(cols);
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) dx[c] = scale * (dy[c] * gain[c] - x[c] * scale * mean);
  }
}

template <typename T>
void rope_forward(T* x, const T* cos, const T* sin, int64_t rows, int64_t row_begin, int64_t stride,
                  int64_t heads, int64_t half, int64_t positions) {
  for (int64_t r = 0; r < rows; ++r, x += stride) {
    const int64_t position = (row_begin + r) % positions;
    const T* __restrict c = cos + position * half;
    const T* __restrict s = sin + position * half;
    for (int64_t h = 0; h < heads; ++h) {
      T* __restrict a = x + h * 2 * half;
      T* __restrict b = a + half;
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) {
        const T left = a[i];
        const T right = b[i];
        a[i] = left * c[i] - right * s[i];
        b[i] = right * c[i] + left * s[i];
      }
    }
  }
}

template <typename T>
void rope_backward(const T* dx, const T* cos, const T* sin, T* y, int64_t rows, int64_t row_begin,
                   int64_t stride, int64_t heads, int64_t half, int64_t positions) {
  for (int64_t r = 0; r < rows; ++r, y += stride, dx += heads * 2 * half) {
    const int64_t position = (row_begin + r) % positions;
    const T* __restrict c = cos + position * half;
    const T* __restrict s = sin + position * half;
    for (int64_t h = 0; h < heads; ++h) {
      const T* __restrict da = dx + h * 2 * half;
      const T* __restrict db = da + half;
      T* __restrict a = y + h * 2 * half;
      T* __restrict b = a + half;
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) {
        a[i] = da[i] * c[i] + db[i] * s[i];
        b[i] = db[i] * c[i] - da[i] * s[i];
      }
    }
  }
}

template <typename T>
void swiglu_forward(const T* __restrict x, T* __restrict act, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; ++r, x += 2 * cols, act += cols) {
    const T* __restrict g = x;
    const T* __restrict u = x + cols;
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) act[c] = g[c] * sigmoid(g[c]) * u[c];
  }
}

template <typename T>
void swiglu_backward(const T* x, const T* __restrict dact, T* dx, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; ++r, x += 2 * cols, dx += 2 * cols, dact += cols) {
    const T* g = x;
    const T* u = x + cols;
    T* dg = dx;
    T* du = dx + cols;
    // dg and du may lie on g and u, element by element: no iteration reads what another writes.
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) {
      const T gate = g[c];
      const T up = u[c];
      const T s = sigmoid(gate);
      const T silu = gate * s;
      dg[c] = dact[c] * up * (s + silu * (T(1) - s));
      du[c] = dact[c] * silu;
    }
  }
}

template <typename T>
void cross_entropy(T* logits, const int64_t* targets, double* loss, int64_t rows, int64_t cols,
                   int64_t ignore, double scale, bool gradient) {
  for (int64_t r = 0; r < rows; ++r, logits += cols) {
    T* __restrict row = logits;
    const int64_t target = targets[r];
    if (target == ignore) {
      loss[r] = 0;
      if (gradient) std::fill(row, row + cols, T(0));
      continue;
    }
    T largest = row[0];
#pragma omp simd reduction(max : largest)
    for (int64_t c = 0; c < cols; ++c) largest = std::max(largest, row[c]);
    const T at_target = row[target] - largest;
    T sum = 0;
    if (gradient) {
#pragma omp simd reduction(+ : sum)
      for (int64_t c = 0; c < cols; ++c) {
        row[c] = exponential(row[c] - largest);
        sum += row[c];
      }
      const T factor = T(scale) / sum;
#pragma omp simd
      for (int64_t c = 0; c < cols; ++c) row[c] *= factor;
      row[target] -= T(scale);
    } else {
#pragma omp simd reduction(+ : sum)
      for (int64_t c = 0; c < cols; ++c) sum += exponential(row[c] - largest);
    }
    loss[r] = std::log(double(sum)) - double(at_target);
  }
}

template <typename T>
double sum_of_squares(const T* __restrict x, int64_t n) {
  constexpr int64_t kBlock = 4096;
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    T sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = begin; i < end; ++i) sum += x[i] * x[i];
    total += double(sum);
  }
  return total;
}

template <typename T>
constexpr Kernels<T> table() {
  return {rms_norm_forward<T>, rms_norm_backward<T>, rope_forward<T>,  rope_backward<T>,
          swiglu_forward<T>,   swiglu_backward<T>,   cross_entropy<T>, sum_of_squares<T>};
}

}  // namespace

namespace TWOBP_ISA {
extern const Kernels<float> float_kernels;
extern const Kernels<double> double_kernels;
const Kernels<float> float_kernels = table<float>();
const Kernels<double> double_kernels = table<double>();
}  // namespace TWOBP_ISA

}  // namespace twobp
