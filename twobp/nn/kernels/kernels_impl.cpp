// The kernels of kernels.h, compiled once per instruction set (TWOBP_ISA names it). Plain loops that the
// compiler vectorises; exp goes to glibc's vector math where there is one.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "twobp/nn/kernels/kernels.h"
#include "twobp/nn/kernels/vector_math.h"

namespace twobp {
namespace {

template <typename T>
inline T sigmoid(T x) {
  return T(1) / (T(1) + exponential(-x));
}

template <typename S, typename T = Compute<S>>
void rms_norm_forward(const S* __restrict x, const T* __restrict gain, S* __restrict y, T* __restrict rstd,
                      int64_t rows, int64_t cols, double eps) {
  for (int64_t r = 0; r < rows; ++r, x += cols, y += cols) {
    T sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < cols; ++c) sum += load(x[c]) * load(x[c]);
    const T scale = T(1) / std::sqrt(sum / T(cols) + T(eps));
    rstd[r] = scale;
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) store(y[c], load(x[c]) * scale * gain[c]);
  }
}

template <typename S, typename T = Compute<S>>
void rms_norm_backward(const S* dy, const S* x, const T* __restrict gain, const T* __restrict rstd, S* dx,
                       T* __restrict dgain, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; ++r, x += cols, dy += cols, dx += cols) {
    const T scale = rstd[r];
    T dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t c = 0; c < cols; ++c) {
      const T product = load(dy[c]) * load(x[c]) * scale;
      dgain[c] += product;
      dot += product * gain[c];
    }
    const T mean = dot / T(cols);
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) {
      store(dx[c], scale * (load(dy[c]) * gain[c] - load(x[c]) * scale * mean));
    }
  }
}

template <typename S, typename T = Compute<S>>
void rope_forward(S* x, const T* cos, const T* sin, int64_t rows, int64_t row_begin, int64_t stride,
                  int64_t heads, int64_t half, int64_t positions) {
  for (int64_t r = 0; r < rows; ++r, x += stride) {
    const int64_t position = (row_begin + r) % positions;
    const T* __restrict c = cos + position * half;
    const T* __restrict s = sin + position * half;
    for (int64_t h = 0; h < heads; ++h) {
      S* __restrict a = x + h * 2 * half;
      S* __restrict b = a + half;
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) {
        const T left = load(a[i]);
        const T right = load(b[i]);
        store(a[i], left * c[i] - right * s[i]);
        store(b[i], right * c[i] + left * s[i]);
      }
    }
  }
}

template <typename S, typename T = Compute<S>>
void rope_backward(S* x, const T* cos, const T* sin, int64_t rows, int64_t row_begin, int64_t stride,
                   int64_t heads, int64_t half, int64_t positions) {
  for (int64_t r = 0; r < rows; ++r, x += stride) {
    const int64_t position = (row_begin + r) % positions;
    const T* __restrict c = cos + position * half;
    const T* __restrict s = sin + position * half;
    for (int64_t h = 0; h < heads; ++h) {
      S* __restrict a = x + h * 2 * half;
      S* __restrict b = a + half;
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) {
        const T left = load(a[i]);
        const T right = load(b[i]);
        store(a[i], left * c[i] + right * s[i]);
        store(b[i], right * c[i] - left * s[i]);
      }
    }
  }
}

template <typename T>
void causal_softmax(T* scores, T* log_sum_exp, int64_t rows, int64_t cols, int64_t first, T scale) {
  for (int64_t r = 0; r < rows; ++r, scores += cols) {
    T* __restrict row = scores;
    const int64_t seen = first + r + 1;
    const T largest = largest_of(row, seen) * scale;
    T sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < seen; ++c) {
      const T e = exponential(row[c] * scale - largest);
      row[c] = e;
      sum += e;
    }
    const T factor = T(1) / sum;
#pragma omp simd
    for (int64_t c = 0; c < seen; ++c) row[c] *= factor;
    for (int64_t c = seen; c < cols; ++c) row[c] = 0;
    log_sum_exp[r] = largest + std::log(sum);
  }
}

template <typename T>
void causal_softmax_backward(T* scores, T* dp, const T* log_sum_exp, const T* y, const T* dy, int64_t rows,
                             int64_t cols, int64_t first, T scale, int64_t dim, int64_t y_stride) {
  for (int64_t r = 0; r < rows; ++r, scores += cols, dp += cols, y += y_stride, dy += y_stride) {
    T* __restrict p = scores;
    T* __restrict ds = dp;
    const int64_t seen = first + r + 1;
    T dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t d = 0; d < dim; ++d) dot += y[d] * dy[d];
    const T lse = log_sum_exp[r];
#pragma omp simd
    for (int64_t c = 0; c < seen; ++c) {
      const T probability = exponential(p[c] * scale - lse);
      ds[c] = scale * probability * (ds[c] - dot);
      p[c] = probability;
    }
    for (int64_t c = seen; c < cols; ++c) p[c] = ds[c] = 0;
  }
}

template <typename S, typename T = Compute<S>>
void swiglu_forward(const S* __restrict x, S* __restrict act, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; ++r, x += 2 * cols, act += cols) {
    const S* __restrict g = x;
    const S* __restrict u = x + cols;
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) {
      const T gate = load(g[c]);
      store(act[c], gate * sigmoid(gate) * load(u[c]));
    }
  }
}

template <typename S, typename T = Compute<S>>
void swiglu_backward(const S* x, const S* __restrict dact, S* dx, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; ++r, x += 2 * cols, dx += 2 * cols, dact += cols) {
    const S* g = x;
    const S* u = x + cols;
    S* dg = dx;
    S* du = dx + cols;
    // dg and du may lie on g and u, element by element: no iteration reads what another writes.
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) {
      const T gate = load(g[c]);
      const T up = load(u[c]);
      const T dy = load(dact[c]);
      const T s = sigmoid(gate);
      const T silu = gate * s;
      store(dg[c], dy * up * (s + silu * (T(1) - s)));
      store(du[c], dy * silu);
    }
  }
}

template <typename S, typename T = Compute<S>>
void cross_entropy(S* logits, const int64_t* targets, double* loss, int64_t rows, int64_t cols,
                   int64_t ignore, double scale, bool gradient) {
  constexpr bool kExact = std::is_same_v<S, T>;  // what is stored loses nothing
  for (int64_t r = 0; r < rows; ++r, logits += cols) {
    S* __restrict row = logits;
    const int64_t target = targets[r];
    if (target == ignore) {
      loss[r] = 0;
      if (gradient) {
        for (int64_t c = 0; c < cols; ++c) store(row[c], T(0));
      }
      continue;
    }
    const T largest = largest_of(row, cols);
    const T at_target = load(row[target]) - largest;
    T sum = 0;
    if (gradient && kExact) {
#pragma omp simd reduction(+ : sum)
      for (int64_t c = 0; c < cols; ++c) {
        const T e = exponential(load(row[c]) - largest);
        store(row[c], e);
        sum += e;
      }
    } else {
#pragma omp simd reduction(+ : sum)
      for (int64_t c = 0; c < cols; ++c) sum += exponential(load(row[c]) - largest);
    }
    if (gradient) {
      const T factor = T(scale) / sum;
      // Before it is rounded to S: the difference of two numbers of equal size.
      const T of_target = (kExact ? load(row[target]) : exponential(at_target)) * factor - T(scale);
#pragma omp simd
      for (int64_t c = 0; c < cols; ++c) {
        store(row[c], (kExact ? load(row[c]) : exponential(load(row[c]) - largest)) * factor);
      }
      store(row[target], of_target);
    }
    loss[r] = std::log(double(sum)) - double(at_target);
  }
}

template <typename S, typename T = Compute<S>>
double sum_of_squares(const S* __restrict x, int64_t n) {
  constexpr int64_t kBlock = 4096;
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    T sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = begin; i < end; ++i) sum += load(x[i]) * load(x[i]);
    total += double(sum);
  }
  return total;
}

template <typename S, typename T = Compute<S>>
constexpr Kernels<S> table() {
  return {rms_norm_forward<S>, rms_norm_backward<S>,       rope_forward<S>,   rope_backward<S>,
          causal_softmax<T>,   causal_softmax_backward<T>, swiglu_forward<S>, swiglu_backward<S>,
          cross_entropy<S>,    sum_of_squares<S>};
}

}  // namespace

namespace TWOBP_ISA {
const KernelTable<Kernels> kernels_table = {table<float>(), table<double>(), table<BFloat16>(),
                                            table<Half>()};
}  // namespace TWOBP_ISA

}  // namespace twobp
