// The kernels of image_kernels.h, compiled once per instruction set (TWOBP_ISA names it). Plain loops over channels
// that the compiler vectorises.
#include <algorithm>
#include <cmath>
#include <limits>

#include "twobp/nn/kernels/image/image_kernels.h"

namespace twobp {
namespace {

template <typename S, typename T = Compute<S>>
void channel_moments(const S* x, T* __restrict mean, T* __restrict squares, int64_t rows, int64_t cols) {
  std::fill(mean, mean + cols, T(0));
  std::fill(squares, squares + cols, T(0));
  int64_t r = 0;
  // Processes four rows at once, so that the sums are loaded and stored once for four additions.
  for (; r + 4 <= rows; r += 4) {
    const S* __restrict a = x + r * cols;
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) {
      mean[c] += (load(a[c]) + load(a[c + cols])) + (load(a[c + 2 * cols]) + load(a[c + 3 * cols]));
    }
  }
  for (; r < rows; ++r) {
    const S* __restrict a = x + r * cols;
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) mean[c] += load(a[c]);
  }
  const T factor = T(1) / T(rows);
#pragma omp simd
  for (int64_t c = 0; c < cols; ++c) mean[c] *= factor;
  for (r = 0; r + 2 <= rows; r += 2) {
    const S* __restrict a = x + r * cols;
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) {
      const T d0 = load(a[c]) - mean[c];
      const T d1 = load(a[c + cols]) - mean[c];
      squares[c] += d0 * d0 + d1 * d1;
    }
  }
  for (; r < rows; ++r) {
    const S* __restrict a = x + r * cols;
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) {
      const T d = load(a[c]) - mean[c];
      squares[c] += d * d;
    }
  }
}

template <typename S, bool kRelu, typename T = Compute<S>>
void scale_rows(const S* x, ChannelScales<T> of, S* y, int64_t rows, int64_t cols) {
  const T* __restrict scale = of.scale;
  const T* __restrict shift = of.shift;
  for (int64_t r = 0; r < rows; ++r, x += cols, y += cols) {
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) {
      const T value = load(x[c]) * scale[c] + shift[c];
      store(y[c], kRelu ? (value > T(0) ? value : T(0)) : value);
    }
  }
}

template <typename S, typename T = Compute<S>>
void channel_scale(const S* x, ChannelScales<T> of, S* y, bool relu, int64_t rows, int64_t cols) {
  relu ? scale_rows<S, true>(x, of, y, rows, cols) : scale_rows<S, false>(x, of, y, rows, cols);
}

template <typename S, typename T = Compute<S>>
void channel_scale_add_relu(const S* x, ChannelScales<T> of, const S* other, ChannelScales<T> of_other, S* y,
                            int64_t rows, int64_t cols) {
  const T* __restrict scale = of.scale;
  const T* __restrict shift = of.shift;
  const T* __restrict other_scale = of_other.scale;
  const T* __restrict other_shift = of_other.shift;
  for (int64_t r = 0; r < rows; ++r, x += cols, y += cols, other += cols) {
    if (other_scale == nullptr) {
#pragma omp simd
      for (int64_t c = 0; c < cols; ++c) {
        const T value = load(x[c]) * scale[c] + shift[c] + load(other[c]);
        store(y[c], value > T(0) ? value : T(0));
      }
    } else {
#pragma omp simd
      for (int64_t c = 0; c < cols; ++c) {
        const T value = load(x[c]) * scale[c] + shift[c] + (load(other[c]) * other_scale[c] + other_shift[c]);
        store(y[c], value > T(0) ? value : T(0));
      }
    }
  }
}

template <typename S, bool kRelu, typename T = Compute<S>>
void sum_rows(const S* dy, const S* x, ChannelScales<T> of, T* __restrict sums, T* __restrict products, int64_t rows,
              int64_t cols) {
  const T* __restrict mean = of.mean;
  const T* __restrict rstd = of.rstd;
  const T* __restrict scale = of.scale;
  const T* __restrict shift = of.shift;
  const auto gradient = [&](const S* dy_row, const S* x_row, int64_t c) {
    const T g = load(dy_row[c]);
    return kRelu ? (load(x_row[c]) * scale[c] + shift[c] > T(0) ? g : T(0)) : g;
  };
  int64_t r = 0;
  for (; r + 2 <= rows; r += 2, x += 2 * cols, dy += 2 * cols) {
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) {
      const T g0 = gradient(dy, x, c);
      const T g1 = gradient(dy + cols, x + cols, c);
      sums[c] += g0 + g1;
      products[c] += (g0 * (load(x[c]) - mean[c]) + g1 * (load(x[c + cols]) - mean[c])) * rstd[c];
    }
  }
  for (; r < rows; ++r, x += cols, dy += cols) {
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) {
      const T g = gradient(dy, x, c);
      sums[c] += g;
      products[c] += g * (load(x[c]) - mean[c]) * rstd[c];
    }
  }
}

template <typename S, typename T = Compute<S>>
void channel_sums(const S* dy, const S* x, ChannelScales<T> of, T* sums, T* products, bool relu, int64_t rows,
                  int64_t cols) {
  relu ? sum_rows<S, true>(dy, x, of, sums, products, rows, cols)
       : sum_rows<S, false>(dy, x, of, sums, products, rows, cols);
}

template <typename S, bool kScaled, typename T = Compute<S>>
void sum_rows_add_relu(const S* dy, const S* x, ChannelScales<T> of, const S* other, ChannelScales<T> of_other, S* g,
                       T* __restrict sums, T* __restrict products, int64_t rows, int64_t cols) {
  const T* __restrict mean = of.mean;
  const T* __restrict rstd = of.rstd;
  const T* __restrict scale = of.scale;
  const T* __restrict shift = of.shift;
  const T* __restrict other_scale = of_other.scale;
  const T* __restrict other_shift = of_other.shift;
  for (int64_t r = 0; r < rows; ++r, x += cols, dy += cols, other += cols, g += cols) {
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) {
      const T added = kScaled ? load(other[c]) * other_scale[c] + other_shift[c] : load(other[c]);
      const T number = load(x[c]);
      const T gradient = number * scale[c] + shift[c] + added > T(0) ? load(dy[c]) : T(0);
      store(g[c], gradient);
      sums[c] += gradient;
      products[c] += gradient * (number - mean[c]) * rstd[c];
    }
  }
}

template <typename S, typename T = Compute<S>>
void channel_sums_add_relu(const S* dy, const S* x, ChannelScales<T> of, const S* other, ChannelScales<T> of_other,
                           S* g, T* sums, T* products, int64_t rows, int64_t cols) {
  of_other.scale == nullptr ? sum_rows_add_relu<S, false>(dy, x, of, other, of_other, g, sums, products, rows, cols)
                            : sum_rows_add_relu<S, true>(dy, x, of, other, of_other, g, sums, products, rows, cols);
}

template <typename S, bool kRelu, bool kKeep, typename T = Compute<S>>
void backward_rows(const S* dy, const S* x, ChannelScales<T> of, const T* __restrict mean_g, const T* __restrict slope,
                   S* dx, S* y, int64_t rows, int64_t cols) {
  const T* __restrict mean = of.mean;
  const T* __restrict scale = of.scale;
  const T* __restrict shift = of.shift;
  for (int64_t r = 0; r < rows; ++r) {
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) {
      const T number = load(x[c]);
      const T value = number * scale[c] + shift[c];
      const T g = kRelu ? (value > T(0) ? load(dy[c]) : T(0)) : load(dy[c]);
      store(dx[c], scale[c] * (g - mean_g[c] - (number - mean[c]) * slope[c]));
      if constexpr (kKeep) store(y[c], kRelu ? (value > T(0) ? value : T(0)) : value);
    }
    x += cols;
    dy += cols;
    dx += cols;
    if constexpr (kKeep) y += cols;
  }
}

template <typename S, typename T = Compute<S>>
void channel_backward(const S* dy, const S* x, ChannelScales<T> of, const T* mean_g, const T* slope, S* dx, S* y,
                      bool relu, int64_t rows, int64_t cols) {
  if (y != nullptr) {
    relu ? backward_rows<S, true, true>(dy, x, of, mean_g, slope, dx, y, rows, cols)
         : backward_rows<S, false, true>(dy, x, of, mean_g, slope, dx, y, rows, cols);
  } else {
    relu ? backward_rows<S, true, false>(dy, x, of, mean_g, slope, dx, y, rows, cols)
         : backward_rows<S, false, false>(dy, x, of, mean_g, slope, dx, y, rows, cols);
  }
}

// Calls visit(output pixel, index of the pixel in the window, input pixel or -1 beyond the border), in memory order.
template <typename Visit>
inline void for_windows(const WindowShape& s, Visit&& visit) {
  const int64_t out_height = s.out_height();
  const int64_t out_width = s.out_width();
  for (int64_t oy = 0; oy < out_height; ++oy) {
    for (int64_t ox = 0; ox < out_width; ++ox) {
      for (int64_t ky = 0; ky < s.kernel; ++ky) {
        const int64_t iy = oy * s.stride + ky - s.padding;
        for (int64_t kx = 0; kx < s.kernel; ++kx) {
          const int64_t ix = ox * s.stride + kx - s.padding;
          const bool inside = iy >= 0 && iy < s.height && ix >= 0 && ix < s.width;
          visit(oy * out_width + ox, ky * s.kernel + kx, inside ? iy * s.width + ix : -1);
        }
      }
    }
  }
}

template <typename S>
void gather_windows(const S* x, const WindowShape& s, S* rows) {
  const int64_t channels = s.channels;
  for_windows(s, [&](int64_t, int64_t, int64_t pixel) {
    if (pixel < 0) {
      std::fill(rows, rows + channels, S{});
    } else {
      std::copy(x + pixel * channels, x + (pixel + 1) * channels, rows);
    }
    rows += channels;
  });
}

template <typename T>
void add_windows(const T* rows, const WindowShape& s, T* dx) {
  const int64_t channels = s.channels;
  for_windows(s, [&](int64_t, int64_t, int64_t pixel) {
    if (pixel >= 0) {
      T* __restrict to = dx + pixel * channels;
      const T* __restrict from = rows;
#pragma omp simd
      for (int64_t c = 0; c < channels; ++c) to[c] += from[c];
    }
    rows += channels;
  });
}

template <typename S, typename T = Compute<S>>
void max_pool(const S* x, const WindowShape& s, S* y, uint8_t* where) {
  const int64_t channels = s.channels;
  int64_t last = -1;
  for_windows(s, [&](int64_t out, int64_t k, int64_t pixel) {
    if (pixel < 0) return;
    const S* __restrict from = x + pixel * channels;
    S* __restrict to = y + out * channels;
    uint8_t* __restrict at = where + out * channels;
    const auto index = static_cast<uint8_t>(k);
    if (out != last) {
      last = out;
#pragma omp simd
      for (int64_t c = 0; c < channels; ++c) {
        to[c] = from[c];
        at[c] = index;
      }
      return;
    }
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) {
      const T largest = load(to[c]);
      const T number = load(from[c]);
      // NaN counts as the largest, as in PyTorch.
      const bool larger = number > largest || number != number;
      to[c] = larger ? from[c] : to[c];
      at[c] = larger ? index : at[c];
    }
  });
}

template <typename S, typename T = Compute<S>>
void max_pool_backward(const S* dy, const uint8_t* where, const WindowShape& s, S* dx) {
  const int64_t channels = s.channels;
  for_windows(s, [&](int64_t out, int64_t k, int64_t pixel) {
    if (pixel < 0) return;
    const S* __restrict from = dy + out * channels;
    S* __restrict to = dx + pixel * channels;
    const uint8_t* __restrict at = where + out * channels;
    const auto index = static_cast<uint8_t>(k);
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) {
      store(to[c], load(to[c]) + (at[c] == index ? load(from[c]) : T(0)));
    }
  });
}

template <typename S>
constexpr ImageKernels<S> table() {
  return {channel_moments<S>,  channel_scale<S>,  channel_scale_add_relu<S>, channel_sums<S>, channel_sums_add_relu<S>,
          channel_backward<S>, gather_windows<S>, add_windows<Compute<S>>,   max_pool<S>,     max_pool_backward<S>};
}

}  // namespace

namespace TWOBP_ISA {
const KernelTable<ImageKernels> image_kernels_table = {table<float>(), table<double>(), table<BFloat16>(),
                                                       table<Half>()};
}  // namespace TWOBP_ISA

}  // namespace twobp
