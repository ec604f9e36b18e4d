// Vectors as wide as the instruction set's registers, and the few functions that they need. They serve kernels whose
// inner loops the compiler does not vectorise on its own. Only sources that are compiled once per instruction set
// include this file, and everything here is local to them.
#pragma once

#include <cstdint>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "twobp/nn/kernels/number.h"

namespace twobp {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

// Arithmetic is element by element. A scalar operand stands for a vector of equal elements.
template <typename T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
};
template <typename T>
using Vector = typename VectorOf<T>::type;
template <typename T>
constexpr int64_t kLanes = kVectorBytes / static_cast<int64_t>(sizeof(T));

constexpr double kLog2E = 1.44269504088896340736;
constexpr double kLn2 = 0.69314718055994530942;

// Loads the first `count` lanes from memory. The other lanes are 0.
template <typename S, typename T = Compute<S>>
inline Vector<T> load_lanes(const S* from, int64_t count) {
  Vector<T> v = {};
  if (count == kLanes<T>) {
    if constexpr (std::is_same_v<S, T>) {
      __builtin_memcpy(&v, from, sizeof v);
    } else {
      T lane[kLanes<T>];
      for (int64_t i = 0; i < kLanes<T>; ++i) lane[i] = load(from[i]);
      __builtin_memcpy(&v, lane, sizeof v);
    }
  } else {
    T lane[kLanes<T>] = {};
    for (int64_t i = 0; i < count; ++i) lane[i] = load(from[i]);
    __builtin_memcpy(&v, lane, sizeof v);
  }
  return v;
}

template <typename S, typename T = Compute<S>>
inline void store_lanes(S* to, Vector<T> v, int64_t count) {
  if (count == kLanes<T>) {
    if constexpr (std::is_same_v<S, T>) {
      __builtin_memcpy(to, &v, sizeof v);
    } else {
      T lane[kLanes<T>];
      __builtin_memcpy(lane, &v, sizeof v);
      for (int64_t i = 0; i < kLanes<T>; ++i) store(to[i], lane[i]);
    }
  } else {
    T lane[kLanes<T>];
    __builtin_memcpy(lane, &v, sizeof v);
    for (int64_t i = 0; i < count; ++i) store(to[i], lane[i]);
  }
}

// Sums pairwise, adding the upper half to the lower one. Halves that are vectors themselves stay in registers.
template <typename T, int kBytes = kVectorBytes, typename V>
inline T sum_of_lanes(V v) {
  if constexpr (kBytes == sizeof(T)) {
    return v[0];
  } else {
    typedef T Half __attribute__((vector_size(kBytes / 2)));
    Half half[2];
    __builtin_memcpy(half, &v, kBytes);
    return sum_of_lanes<T, kBytes / 2>(half[0] + half[1]);
  }
}

// Several vectors that go through the same steps in turn. Each step of a vector waits for its previous step, and a core
// looks only a limited distance ahead for independent work.
template <typename T, int K>
struct Vectors {
  Vector<T> v[K];
};

// c[0] + c[1] x + c[2] x^2 + ...
template <typename T, int K, int N>
inline Vectors<T, K> polynomial(const Vectors<T, K>& x, const T (&c)[N]) {
  Vectors<T, K> sum;
  for (int k = 0; k < K; ++k) sum.v[k] = x.v[k] * c[N - 1] + c[N - 2];
  for (int i = N - 3; i >= 0; --i) {
    for (int k = 0; k < K; ++k) sum.v[k] = sum.v[k] * x.v[k] + c[i];
  }
  return sum;
}

// Chebyshev interpolants of 2^f for f from 0 to 1. The relative errors are below 3e-9 and 1e-19.
template <int K>
inline Vectors<float, K> exp2_of_fraction(const Vectors<float, K>& f) {
  static constexpr float kC[] = {1.f,          0.693146932758867f,   0.240230454412306f,   0.0554806301967053f,
                                 0.009684186f, 0.00123913318344114f, 0.000218657847865981f};
  return polynomial(f, kC);
}
template <int K>
inline Vectors<double, K> exp2_of_fraction(const Vectors<double, K>& f) {
  static constexpr double kC[] = {1.0,
                                  0.69314718055994529,
                                  0.240226506959101779,
                                  0.0555041086647981399,
                                  0.00961812910789581856,
                                  0.00133335581283015609,
                                  0.000154035311812395517,
                                  1.52527108995361559e-5,
                                  1.32159414109095564e-6,
                                  1.01719142535476744e-7,
                                  7.11112799318383314e-9,
                                  4.11912503177561781e-10,
                                  3.63927613104984659e-11};
  return polynomial(f, kC);
}

// 2^x. Without AVX-512, x is limited to the exponents of normal numbers: smaller results become 2^-126 (2^-1022). NaN
// stays NaN.
#if defined(__AVX512F__)
// The masks are all ones, because GCC 12 warns of the undefined operand of the other forms.
constexpr int kDown = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
inline Vector<float> fraction_of(Vector<float> x) {
  return _mm512_maskz_reduce_ps(0xffff, x, kDown);
}
inline Vector<double> fraction_of(Vector<double> x) {
  return _mm512_maskz_reduce_pd(0xff, x, kDown);
}
inline Vector<float> scaled(Vector<float> power, Vector<float> x) {
  return _mm512_maskz_scalef_ps(0xffff, power, x);
}
inline Vector<double> scaled(Vector<double> power, Vector<double> x) {
  return _mm512_maskz_scalef_pd(0xff, power, x);
}
template <typename T, int K>
inline Vectors<T, K> exp2(const Vectors<T, K>& x) {
  Vectors<T, K> power;
  for (int k = 0; k < K; ++k) power.v[k] = fraction_of(x.v[k]);
  power = exp2_of_fraction(power);
  for (int k = 0; k < K; ++k) power.v[k] = scaled(power.v[k], x.v[k]);
  return power;
}
#else
// The larger (smaller) of the two; NaN if x is NaN. GCC makes two instructions of the comparison, although one
// instruction exists for both.
#if defined(__AVX2__)
inline Vector<float> at_least(Vector<float> low, Vector<float> x) {
  return _mm256_max_ps(low, x);
}
inline Vector<double> at_least(Vector<double> low, Vector<double> x) {
  return _mm256_max_pd(low, x);
}
inline Vector<float> at_most(Vector<float> high, Vector<float> x) {
  return _mm256_min_ps(high, x);
}
inline Vector<double> at_most(Vector<double> high, Vector<double> x) {
  return _mm256_min_pd(high, x);
}
#else
template <typename V>
inline V at_least(V low, V x) {
  return x < low ? low : x;
}
template <typename V>
inline V at_most(V high, V x) {
  return x > high ? high : x;
}
#endif

template <typename T, int K>
inline Vectors<T, K> exp2(Vectors<T, K> x) {
  using Bits = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
  constexpr int kMantissa = sizeof(T) == 4 ? 23 : 52;
  constexpr Bits kBias = sizeof(T) == 4 ? 127 : 1023;
  // After adding this, the low bits of the sum are the rounded number as an exponent.
  constexpr T kRound = T(1.5) * T(Bits(1) << kMantissa) + T(kBias);
  Vectors<T, K> whole;  // x rounded down, up to a tie
  for (int k = 0; k < K; ++k) x.v[k] = at_least(Vector<T>{} + T(1 - kBias), x.v[k]);
  for (int k = 0; k < K; ++k) x.v[k] = at_most(Vector<T>{} + T(kBias), x.v[k]);
  for (int k = 0; k < K; ++k) whole.v[k] = (x.v[k] - T(0.5)) + kRound;
  for (int k = 0; k < K; ++k) x.v[k] -= whole.v[k] - kRound;
  Vectors<T, K> power = exp2_of_fraction(x);
  for (int k = 0; k < K; ++k) power.v[k] *= (Vector<T>)((Vector<Bits>)whole.v[k] << kMantissa);
  return power;
}
#endif

inline Vector<float> exp2(Vector<float> x) {
  return exp2(Vectors<float, 1>{{x}}).v[0];
}
inline Vector<double> exp2(Vector<double> x) {
  return exp2(Vectors<double, 1>{{x}}).v[0];
}

template <typename T>
inline Vector<T> sigmoid_of(Vector<T> x) {
  return T(1) / (exp2(x * T(-kLog2E)) + T(1));
}

// 2 atanh(s) / s as a polynomial of s^2, for s up to 1/3. The relative errors are below 2e-10 and 1e-20.
inline Vector<float> atanh_ratio(Vector<float> square) {
  static constexpr float kC[] = {2.f,           0.66666679026434f,  0.399987112468623f,
                                 0.2862020741f, 0.213985605066785f, 0.24393908084023f};
  return polynomial(Vectors<float, 1>{{square}}, kC).v[0];
}
inline Vector<double> atanh_ratio(Vector<double> square) {
  static constexpr double kC[] = {2.0,
                                  0.666666666666666661,
                                  0.40000000000000268,
                                  0.285714285713756515,
                                  0.22222222227641732,
                                  0.181818178521812272,
                                  0.15384628221264642,
                                  0.133329995203851707,
                                  0.117706185552483092,
                                  0.104549475155308627,
                                  0.100981854686340596,
                                  0.0578540899766765006,
                                  0.160725661346782718};
  return polynomial(Vectors<double, 1>{{square}}, kC).v[0];
}

// log(1 + exp(x)), accurate also where it is small, and its slope, the sigmoid. With u = exp(-|x|), it is max(x, 0) +
// log(1 + u), where log(1 + u) = 2 atanh(u / (2 + u)).
template <typename T>
struct Softplus {
  Vector<T> value;
  Vector<T> slope;
};
template <typename T>
inline Softplus<T> softplus(Vector<T> x) {
  const Vector<T> zero = {};
  const Vector<T> u = exp2((x < zero ? x : -x) * T(kLog2E));
  const Vector<T> s = u / (u + T(2));
  const Vector<T> inverse = T(1) / (u + T(1));
  return {(x > zero ? x : zero) + s * atanh_ratio(s * s), x < zero ? u * inverse : inverse};
}

}  // namespace
}  // namespace twobp
