// The kernels of encoder_kernels.h, compiled once per instruction set (TWOBP_ISA names it). They are plain loops that
// the compiler vectorises. exp and erf call glibc's vector math if it exists.
#include <algorithm>
#include <cmath>

#include "twobp/nn/kernels/rows/row_kernels.h"
#include "twobp/nn/kernels/vector_math.h"

namespace twobp {
namespace {

template <typename S, typename T = Compute<S>>
void layer_norm_forward(const S* __restrict x, const T* __restrict gain, const T* __restrict bias, S* __restrict y,
                        T* __restrict mean, T* __restrict rstd, int64_t rows, int64_t cols, double eps) {
  for (int64_t r = 0; r < rows; ++r, x += cols, y += cols) {
    T sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < cols; ++c) sum += load(x[c]);
    const T middle = sum / T(cols);
    T squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t c = 0; c < cols; ++c) {
      const T off = load(x[c]) - middle;
      squares += off * off;
    }
    const T scale = T(1) / std::sqrt(squares / T(cols) + T(eps));
    mean[r] = middle;
    rstd[r] = scale;
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) store(y[c], (load(x[c]) - middle) * scale * gain[c] + bias[c]);
  }
}

template <typename S, typename T = Compute<S>>
void layer_norm_backward(const S* dy, const S* x, const T* __restrict gain, const T* __restrict mean,
                         const T* __restrict rstd, S* dx, T* __restrict dgain, T* __restrict dbias, int64_t rows,
                         int64_t cols) {
  for (int64_t r = 0; r < rows; ++r, x += cols, dy += cols, dx += cols) {
    const T middle = mean[r];
    const T scale = rstd[r];
    T sum = 0;
    T dot = 0;
#pragma omp simd reduction(+ : sum, dot)
    for (int64_t c = 0; c < cols; ++c) {
      const T gradient = load(dy[c]);
      const T xhat = (load(x[c]) - middle) * scale;
      dbias[c] += gradient;
      dgain[c] += gradient * xhat;
      sum += gradient * gain[c];
      dot += gradient * gain[c] * xhat;
    }
    const T mean_g = sum / T(cols);
    const T mean_dot = dot / T(cols);
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) {
      const T xhat = (load(x[c]) - middle) * scale;
      store(dx[c], scale * (load(dy[c]) * gain[c] - mean_g - xhat * mean_dot));
    }
  }
}

constexpr double kHalfRoot = 0.70710678118654752440;   // sqrt(1 / 2)
constexpr double kNormal = 0.39894228040143267794;     // 1 / sqrt(2 pi)
constexpr double kTanhScale = 0.79788456080286535588;  // sqrt(2 / pi)
constexpr double kTanhCubic = 0.044715;

// The normal distribution's density at x, without its constant factor.
template <typename T>
inline T bell(T x) {
  return exponential(T(-0.5) * x * x);
}
// The factor of x in gelu(x): the normal distribution function at x, given bell(x).
inline double erf_gate(double x, double) {
  return 0.5 * (1 + ::erf(x * kHalfRoot));
}
// erfc(u) = t P(t) exp(-u^2), t = 1 / (1 + 0.375 u), in the form of Abramowitz and Stegun 7.1.26. We fitted P, of
// degree 8, to a relative error of 1.2e-8 for u from 0 to 10.
inline float erf_gate(float x, float bell_x) {
  const float u = std::fabs(x) * float(kHalfRoot);
  const float t = 1 / (1 + 0.375f * u);
  float p = 0.0615384964f;
  p = p * t - 0.287329730f;
  p = p * t + 0.432397948f;
  p = p * t - 0.229412646f;
  p = p * t + 0.273724240f;
  p = p * t + 0.121505117f;
  p = p * t + 0.205313452f;
  p = p * t + 0.210649653f;
  p = p * t + 0.211613476f;
  const float tail = 0.5f * t * p * bell_x;
  return x < 0 ? tail : 1 - tail;
}
// (1 + tanh(u)) / 2 is the sigmoid of 2 u.
template <typename T>
inline T tanh_gate(T x) {
  const T u = T(2 * kTanhScale) * (x + T(kTanhCubic) * x * x * x);
  return T(1) / (T(1) + exponential(-u));
}

template <typename S, typename T = Compute<S>>
void gelu_forward(const S* x, S* y, int64_t n, GeluForm form) {
  if (form == GeluForm::kErf) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const T v = load(x[i]);
      store(y[i], v * erf_gate(v, bell(v)));
    }
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const T v = load(x[i]);
      store(y[i], v * tanh_gate(v));
    }
  }
}

template <typename T>
inline T tanh_slope(T x, T gate) {
  const T inner = T(2 * kTanhScale) * (T(1) + T(3 * kTanhCubic) * x * x);
  return gate + x * gate * (T(1) - gate) * inner;
}

// gelu(x) = x * gate, gelu'(x) = slope.
template <typename T>
struct Factors {
  T gate;
  T slope;
};

template <typename T>
struct ErfFactors {
  Factors<T> operator()(T x) const {
    const T density = bell(x);
    const T gate = erf_gate(x, density);
    return {gate, gate + x * T(kNormal) * density};
  }
};
template <typename T>
struct TanhFactors {
  Factors<T> operator()(T x) const {
    const T gate = tanh_gate(x);
    return {gate, tanh_slope(x, gate)};
  }
};

template <typename S, typename T, typename Form>
void gelu_backward_as(const S* x, const S* dy, S* dx, S* act, int64_t n, Form form) {
  if (act == nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) store(dx[i], load(dy[i]) * form(load(x[i])).slope);
    return;
  }
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const T v = load(x[i]);
    const Factors<T> factors = form(v);
    store(dx[i], load(dy[i]) * factors.slope);
    store(act[i], v * factors.gate);
  }
}

template <typename S, typename T = Compute<S>>
void gelu_backward(const S* x, const S* dy, S* dx, S* act, int64_t n, GeluForm form) {
  if (form == GeluForm::kErf) {
    gelu_backward_as<S, T>(x, dy, dx, act, n, ErfFactors<T>());
  } else {
    gelu_backward_as<S, T>(x, dy, dx, act, n, TanhFactors<T>());
  }
}

template <typename S, typename T, typename Form>
void geglu_forward_as(const S* x, int64_t stride, S* act, int64_t rows, int64_t cols, Form form) {
  gated_rows<T>(x, stride, act, rows, cols, [=](T gate, T up) { return gate * form(gate).gate * up; });
}

template <typename S, typename T = Compute<S>>
void geglu_forward(const S* x, int64_t stride, S* act, int64_t rows, int64_t cols, GeluForm form) {
  if (form == GeluForm::kErf) {
    geglu_forward_as<S, T>(x, stride, act, rows, cols, ErfFactors<T>());
  } else {
    geglu_forward_as<S, T>(x, stride, act, rows, cols, TanhFactors<T>());
  }
}

template <typename S, typename T, typename Form>
void geglu_backward_as(const S* x, int64_t stride, const S* dact, S* dx, int64_t dx_stride, int64_t rows, int64_t cols,
                       Form form) {
  gated_rows_backward<T>(x, stride, dact, dx, dx_stride, rows, cols, [=](T gate, T up, T dy) {
    const Factors<T> factors = form(gate);
    return GatedGradient<T>{dy * up * factors.slope, dy * gate * factors.gate};
  });
}

template <typename S, typename T = Compute<S>>
void geglu_backward(const S* x, int64_t stride, const S* dact, S* dx, int64_t dx_stride, int64_t rows, int64_t cols,
                    GeluForm form) {
  if (form == GeluForm::kErf) {
    geglu_backward_as<S, T>(x, stride, dact, dx, dx_stride, rows, cols, ErfFactors<T>());
  } else {
    geglu_backward_as<S, T>(x, stride, dact, dx, dx_stride, rows, cols, TanhFactors<T>());
  }
}

template <typename S, typename T = Compute<S>>
void dropout(const S* x, const S* add, S* y, int64_t rows, int64_t cols, const DropoutMask& mask, int64_t row_begin) {
  if (mask.threshold == 0) {
#pragma omp simd
    for (int64_t i = 0; i < rows * cols; ++i) {
      store(y[i], add == nullptr ? load(x[i]) : load(x[i]) + load(add[i]));
    }
    return;
  }
  for (int64_t r = 0; r < rows; ++r, x += cols, y += cols) {
    const auto row = static_cast<uint32_t>(row_begin + r);
    if (add == nullptr) {
      for_each_kept<T>(mask, row, cols, cols, [&](int64_t c, T keep) { store(y[c], load(x[c]) * keep); });
    } else {
      for_each_kept<T>(mask, row, cols, cols,
                       [&](int64_t c, T keep) { store(y[c], load(x[c]) * keep + load(add[c])); });
      add += cols;
    }
  }
}

template <typename S>
constexpr EncoderKernels<S> table() {
  return {layer_norm_forward<S>, layer_norm_backward<S>, gelu_forward<S>, gelu_backward<S>,
          geglu_forward<S>,      geglu_backward<S>,      dropout<S>};
}

}  // namespace

namespace TWOBP_ISA {
const KernelTable<EncoderKernels> encoder_kernels_table = {table<float>(), table<double>(), table<BFloat16>(),
                                                           table<Half>()};
}  // namespace TWOBP_ISA

}  // namespace twobp
