// The kernels of kernels.h, compiled once per instruction set (TWOBP_ISA names it). They are plain loops that the
// compiler vectorises. exp calls glibc's vector math if it exists.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "twobp/nn/kernels/rows/row_kernels.h"
#include "twobp/nn/kernels/vector_math.h"

namespace twobp {
namespace {

template <typename T>
inline T sigmoid(T x) {
  return T(1) / (T(1) + exponential(-x));
}

template <typename S, typename T = Compute<S>>
void add_rows(const S* __restrict x, int64_t stride, T* __restrict sums, int64_t rows, int64_t cols) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4, x += 4 * stride) {
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) {
      sums[c] += (load(x[c]) + load(x[c + stride])) + (load(x[c + 2 * stride]) + load(x[c + 3 * stride]));
    }
  }
  for (; r < rows; ++r, x += stride) {
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) sums[c] += load(x[c]);
  }
}

template <typename S, typename T = Compute<S>>
void add_row(S* __restrict x, int64_t stride, const T* __restrict row, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; ++r, x += stride) {
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) store(x[c], load(x[c]) + row[c]);
  }
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
void rope(S* x, const T* cos, const T* sin, T sign, int64_t rows, int64_t row_begin, int64_t stride, int64_t heads,
          int64_t step, int64_t half, int64_t positions) {
  for (int64_t r = 0; r < rows; ++r, x += stride) {
    const int64_t position = (row_begin + r) % positions;
    const T* __restrict c = cos + position * half;
    const T* __restrict s = sin + position * half;
    for (int64_t h = 0; h < heads; ++h) {
      S* __restrict a = x + h * step;
      S* __restrict b = a + half;
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) {
        const T left = load(a[i]);
        const T right = load(b[i]);
        const T turn = sign * s[i];
        store(a[i], left * c[i] - right * turn);
        store(b[i], right * c[i] + left * turn);
      }
    }
  }
}

// The columns [begin, end) that a row sees.
struct Seen {
  int64_t begin, end;
  int64_t count() const { return end - begin; }
};
template <typename T>
Seen seen_by(const ScoreBlock<T>& block, int64_t row) {
  return {block.starts == nullptr ? 0 : block.starts[row], std::min(block.cols, block.seen + row)};
}

// kPlain: without shift, dropout and cap.
template <bool kPlain, typename T>
void softmax_forward_as(const ScoreBlock<T>& block, T* scores, T* __restrict log_sum) {
  const T scale = block.scale;
  for (int64_t r = 0; r < block.rows; ++r, scores += block.cols) {
    const Seen seen = seen_by(block, r);
    const int64_t count = seen.count();
    T* __restrict row = scores + seen.begin;
    if (!kPlain && block.cap != 0) {
      const T to_cap = scale / block.cap;
#pragma omp simd
      for (int64_t c = 0; c < count; ++c) row[c] = hyperbolic_tangent(row[c] * to_cap) / to_cap;
    }
    if (!kPlain && block.shift != nullptr) {
      const T* __restrict shift = block.shift + seen.begin;
#pragma omp simd
      for (int64_t c = 0; c < count; ++c) row[c] += shift[c] / scale;
    }
    const T largest = largest_of(row, count) * scale;
    T sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < count; ++c) {
      const T e = exponential(row[c] * scale - largest);
      row[c] = e;
      sum += e;
    }
    const T norm = T(1) / sum;
    if (kPlain || block.dropout.threshold == 0) {
#pragma omp simd
      for (int64_t c = 0; c < count; ++c) row[c] *= norm;
    } else {
      for_each_kept<T>(block.dropout, static_cast<uint32_t>(block.row_begin + r), block.mask_cols, count,
                       [=](int64_t c, T keep) { row[c] *= norm * keep; });
    }
    std::fill(scores, row, T(0));
    std::fill(scores + seen.end, scores + block.cols, T(0));
    log_sum[r] = largest + std::log(sum);
  }
}

template <typename T>
void softmax_forward(const ScoreBlock<T>& block, T* scores, T* log_sum) {
  if (block.shift == nullptr && block.dropout.threshold == 0 && block.cap == 0) {
    softmax_forward_as<true>(block, scores, log_sum);
  } else {
    softmax_forward_as<false>(block, scores, log_sum);
  }
}

// The probability of a column before dropout, and the slope of the cap there.
template <typename T>
struct Weighed {
  T probability;
  T slope;
};

// One row of softmax_backward, from the first column that it sees on. weigh(score, c) is of column c.
template <bool kCapped, typename T, typename Weigh>
inline void softmax_backward_row(T* __restrict p, T* __restrict ds, T dot, const ScoreBlock<T>& block, int64_t r,
                                 int64_t seen, Weigh weigh) {
  const T scale = block.scale;
  const auto row = static_cast<uint32_t>(block.row_begin + r);
  if (block.dropout.threshold == 0) {
#pragma omp simd
    for (int64_t c = 0; c < seen; ++c) {
      const Weighed<T> weighed = weigh(p[c], c);
      ds[c] = scale * weighed.probability * (ds[c] - dot) * weighed.slope;
      p[c] = weighed.probability;
    }
  } else if constexpr (kCapped) {
    for_each_kept<T>(block.dropout, row, block.mask_cols, seen, [&](int64_t c, T keep) {
      const Weighed<T> weighed = weigh(p[c], c);
      ds[c] = scale * weighed.probability * (ds[c] * keep - dot) * weighed.slope;
      p[c] = weighed.probability * keep;
    });
  } else {
#pragma omp simd
    for (int64_t c = 0; c < seen; ++c) p[c] = weigh(p[c], c).probability;
    for_each_kept<T>(block.dropout, row, block.mask_cols, seen, [&](int64_t c, T keep) {
      ds[c] = scale * p[c] * (ds[c] * keep - dot);
      p[c] *= keep;
    });
  }
}

template <bool kCapped, typename T>
void softmax_backward_as(const ScoreBlock<T>& block, T* scores, T* dp, const T* __restrict log_sum, const T* y,
                         const T* dy, int64_t dim, int64_t y_stride) {
  const T scale = block.scale, cap = block.cap;
  const T to_cap = kCapped ? scale / cap : T(1);
  for (int64_t r = 0; r < block.rows; ++r, scores += block.cols, dp += block.cols, y += y_stride, dy += y_stride) {
    T dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t d = 0; d < dim; ++d) dot += y[d] * dy[d];
    const T offset = log_sum[r];
    const Seen seen = seen_by(block, r);
    T* const p = scores + seen.begin;
    T* const ds = dp + seen.begin;
    const auto weigh = [=](T score, T minus) -> Weighed<T> {
      if constexpr (kCapped) {
        const T t = hyperbolic_tangent(score * to_cap);
        return {exponential(cap * t - minus), T(1) - t * t};
      } else {
        return {exponential(score * scale - minus), T(1)};
      }
    };
    if (block.shift == nullptr) {
      softmax_backward_row<kCapped>(p, ds, dot, block, r, seen.count(),
                                    [=](T score, int64_t) { return weigh(score, offset); });
    } else {
      const T* __restrict shift = block.shift + seen.begin;
      softmax_backward_row<kCapped>(p, ds, dot, block, r, seen.count(),
                                    [=](T score, int64_t c) { return weigh(score, offset - shift[c]); });
    }
    for (T* row : {scores, dp}) {
      std::fill(row, row + seen.begin, T(0));
      std::fill(row + seen.end, row + block.cols, T(0));
    }
  }
}

template <typename T>
void softmax_backward(const ScoreBlock<T>& block, T* scores, T* dp, const T* log_sum, const T* y, const T* dy,
                      int64_t dim, int64_t y_stride) {
  const auto backward = block.cap == 0 ? softmax_backward_as<false, T> : softmax_backward_as<true, T>;
  backward(block, scores, dp, log_sum, y, dy, dim, y_stride);
}

template <typename S, typename T = Compute<S>>
void swiglu_forward(const S* x, int64_t stride, S* act, int64_t rows, int64_t cols) {
  gated_rows<T>(x, stride, act, rows, cols, [](T gate, T up) { return gate * sigmoid(gate) * up; });
}

template <typename S, typename T = Compute<S>>
void swiglu_backward(const S* x, int64_t stride, const S* dact, S* dx, int64_t dx_stride, int64_t rows, int64_t cols) {
  gated_rows_backward<T>(x, stride, dact, dx, dx_stride, rows, cols, [](T gate, T up, T dy) {
    const T s = sigmoid(gate);
    const T silu = gate * s;
    return GatedGradient<T>{dy * up * (s + silu * (T(1) - s)), dy * silu};
  });
}

template <typename S, typename T = Compute<S>>
void cross_entropy(S* logits, int64_t stride, const int64_t* targets, double* loss, int64_t rows, int64_t cols,
                   int64_t ignore, double scale, bool gradient) {
  constexpr bool kExact = std::is_same_v<S, T>;  // storing loses no precision
  for (int64_t r = 0; r < rows; ++r, logits += stride) {
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
      // Computed before rounding to S, because it is the difference of two numbers of similar size.
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
void soft_cap(S* __restrict x, T* __restrict slope, int64_t n, T cap) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const T t = hyperbolic_tangent(load(x[i]) / cap);
    store(x[i], cap * t);
    slope[i] = T(1) - t * t;
  }
}

template <typename S, typename T = Compute<S>>
void multiply(S* __restrict x, const T* __restrict factor, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) store(x[i], load(x[i]) * factor[i]);
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
  return {add_rows<S>,        add_row<S>,          rms_norm_forward<S>, rms_norm_backward<S>, rope<S>,
          softmax_forward<T>, softmax_backward<T>, swiglu_forward<S>,   swiglu_backward<S>,   cross_entropy<S>,
          soft_cap<S>,        multiply<S>,         sum_of_squares<S>};
}

}  // namespace

namespace TWOBP_ISA {
const KernelTable<Kernels> kernels_table = {table<float>(), table<double>(), table<BFloat16>(), table<Half>()};
}  // namespace TWOBP_ISA

}  // namespace twobp
