// Compares the image kernels for every instruction set that this CPU supports, in float and double, with plain loops in
// long double: sizes around vector widths, in-place calls, guards behind the buffers, and NaN.
#include "twobp/nn/kernels/image/image_kernels.h"

#include "tests/nn/kernel_test_util.h"

namespace twobp::TWOBP_FILE {
namespace {

using namespace test;

class ImageKernelsTest : public KernelFamilyTest<ImageKernels> {};

TEST(EveryTap, MeetsTheImage) {
  const auto by_walking = [](int64_t size, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation) {
    for (int64_t tap = 0; tap < kernel; ++tap) {
      bool meets = false;
      for (int64_t at = -padding; at + dilation * (kernel - 1) < size + padding; at += stride)
        meets |= at + tap * dilation >= 0 && at + tap * dilation < size;
      if (!meets) return false;
    }
    return true;
  };
  for (int64_t size = 1; size < 9; ++size) {
    for (const int64_t kernel : {1, 2, 3, 5}) {
      for (const int64_t stride : {1, 2, 3}) {
        for (const int64_t padding : {0, 1, 2, 3}) {
          for (const int64_t dilation : {1, 2}) {
            if (size + 2 * padding < dilation * (kernel - 1) + 1) continue;
            EXPECT_EQ(every_tap_meets(size, kernel, stride, padding, dilation),
                      by_walking(size, kernel, stride, padding, dilation))
                << size << ' ' << kernel << ' ' << stride << ' ' << padding << ' ' << dilation;
          }
        }
      }
    }
  }
  EXPECT_FALSE(every_tap_meets(1, 3, 2, 1));
  EXPECT_TRUE(every_tap_meets(3, 3, 2, 1));
}

// Images, a gradient, and the per-channel quantities of two norms.
template <typename T>
struct NormData {
  explicit NormData(Shape s)
      : rows(s.rows),
        cols(s.cols),
        x(rows * cols, 1),
        other(rows * cols, 2),
        dy(rows * cols, 3),
        scales(4 * cols, 4),
        other_scales(4 * cols, 5) {}

  static ChannelScales<T> of(Buffer<T>& b, int64_t cols) {
    return {b.data(), b.data() + cols, b.data() + 2 * cols, b.data() + 3 * cols};
  }
  ChannelScales<T> of() { return of(scales, cols); }
  ChannelScales<T> of_other() { return of(other_scales, cols); }
  // (x * scale + shift) would round differently in T. So the mask is not compared where the sum is nearly 0.
  Real value(const Buffer<T>& from, const Buffer<T>& s, int64_t i) const {
    const int64_t c = i % cols;
    return from[i] * s[2 * cols + c] + s[3 * cols + c];
  }

  int64_t rows, cols;
  Buffer<T> x, other, dy, scales, other_scales;
};

TEST_P(ImageKernelsTest, Moments) {
  for_each_type([]<typename T>(const ImageKernels<T>& k) {
    for (const Shape shape : kShapes) {
      NormData<T> d(shape);
      Buffer<T> mean(d.cols, 8), squares(d.cols, 9);
      k.channel_moments(d.x.data(), mean.data(), squares.data(), d.rows, d.cols);
      const Buffer<T>& x = d.x;
      std::vector<Real> exact_mean(d.cols), exact_squares(d.cols);
      for (int64_t i = 0; i < x.size(); ++i) exact_mean[i % d.cols] += x[i] / Real(d.rows);
      for (int64_t i = 0; i < x.size(); ++i) {
        const Real off = x[i] - exact_mean[i % d.cols];
        exact_squares[i % d.cols] += off * off;
      }
      expect_close(mean, exact_mean, static_cast<double>(d.rows) + 2, 4, "mean");
      expect_close(squares, exact_squares, 3 * static_cast<double>(d.rows) + 4, 16 * static_cast<double>(d.rows),
                   "squares");
    }
  });
}

TEST_P(ImageKernelsTest, ScaleAndAdd) {
  for_each_type([]<typename T>(const ImageKernels<T>& k) {
    for (const Shape shape : kShapes) {
      NormData<T> d(shape);
      const NormData<T>& c = d;
      for (const bool relu : {false, true}) {
        Buffer<T> y = d.x;  // in place
        k.channel_scale(y.data(), d.of(), y.data(), relu, d.rows, d.cols);
        std::vector<Real> expected;
        for (int64_t i = 0; i < y.size(); ++i) {
          const Real value = c.value(c.x, c.scales, i);
          expected.push_back(relu ? std::max<Real>(value, 0) : value);
        }
        expect_close(y, expected, 3, 20, "y");
      }
      for (const bool scaled : {false, true}) {
        Buffer<T> y(d.rows * d.cols);
        k.channel_scale_add_relu(d.x.data(), d.of(), d.other.data(), scaled ? d.of_other() : ChannelScales<T>{},
                                 y.data(), d.rows, d.cols);
        std::vector<Real> expected;
        for (int64_t i = 0; i < y.size(); ++i) {
          const Real added = scaled ? c.value(c.other, c.other_scales, i) : c.other[i];
          expected.push_back(std::max<Real>(c.value(c.x, c.scales, i) + added, 0));
        }
        expect_close(y, expected, 5, 40, "y of the sum");
      }
    }
  });
}

TEST_P(ImageKernelsTest, BackwardSumsAndBackward) {
  for_each_type([]<typename T>(const ImageKernels<T>& k) {
    for (const Shape shape : kShapes) {
      NormData<T> d(shape);
      const NormData<T>& c = d;
      const int64_t n = d.cols;
      for (int mode = 0; mode < 4; ++mode) {  // plain; ReLU; x added, ReLU; scaled x added, ReLU
        SCOPED_TRACE(mode);
        std::vector<Real> g, value;
        for (int64_t i = 0; i < d.x.size(); ++i) {
          Real v = c.value(c.x, c.scales, i);
          if (mode == 2) v += c.other[i];
          if (mode == 3) v += c.value(c.other, c.other_scales, i);
          ASSERT_GT(std::abs(v), 1e-6) << "a mask that rounding decides";
          value.push_back(v);
          g.push_back(mode > 0 && v <= 0 ? 0 : c.dy[i]);
        }
        Buffer<T> sums(n, 6), products(n, 7), written = d.dy;
        std::vector<Real> exact_sums, exact_products;
        for (int64_t i = 0; i < n; ++i) {
          exact_sums.push_back(static_cast<const Buffer<T>&>(sums)[i]);
          exact_products.push_back(static_cast<const Buffer<T>&>(products)[i]);
        }
        for (int64_t i = 0; i < d.x.size(); ++i) {
          exact_sums[i % n] += g[i];
          exact_products[i % n] += g[i] * (c.x[i] - c.scales[i % n]) * c.scales[n + i % n];
        }
        if (mode < 2) {
          k.channel_sums(d.dy.data(), d.x.data(), d.of(), sums.data(), products.data(), mode == 1, d.rows, n);
        } else {
          k.channel_sums_add_relu(written.data(), d.x.data(), d.of(), d.other.data(),
                                  mode == 3 ? d.of_other() : ChannelScales<T>{}, written.data(), sums.data(),
                                  products.data(), d.rows, n);
          expect_close(written, g, 0, 1, "g");
        }
        const auto rows = static_cast<double>(d.rows);
        expect_close(sums, exact_sums, rows + 2, 4 * (rows + 1), "sums");
        expect_close(products, exact_products, rows + 6, 60 * (rows + 1), "products");
        if (mode > 1) continue;
        const Buffer<T> means(2 * n, 10);
        Buffer<T> dx = d.dy, y = d.x;  // each in place
        k.channel_backward(dx.data(), y.data(), d.of(), means.data(), means.data() + n, dx.data(), y.data(), mode == 1,
                           d.rows, n);
        std::vector<Real> exact_dx, exact_y;
        for (int64_t i = 0; i < d.x.size(); ++i) {
          const int64_t at = i % n;
          exact_dx.push_back(c.scales[2 * n + at] * (g[i] - means[at] - (c.x[i] - c.scales[at]) * means[n + at]));
          exact_y.push_back(mode == 1 ? std::max<Real>(value[i], 0) : value[i]);
        }
        expect_close(dx, exact_dx, 6, 120, "dx");
        expect_close(y, exact_y, 3, 20, "y");
        Buffer<T> over_x = d.x;
        k.channel_backward(d.dy.data(), over_x.data(), d.of(), means.data(), means.data() + n, over_x.data(), nullptr,
                           mode == 1, d.rows, n);
        expect_close(over_x, exact_dx, 6, 120, "dx over x, without y");
      }
    }
  });
}

const std::vector<WindowShape> kWindows = {
    {5, 4, 3, 3, 1, 1}, {6, 7, 17, 3, 2, 1}, {4, 4, 1, 2, 2, 0}, {9, 8, 8, 7, 2, 3}, {3, 3, 16, 1, 1, 0}};

// at(output pixel, pixel of the window) is the input pixel, or -1.
int64_t input_pixel(const WindowShape& s, int64_t out, int64_t k) {
  const int64_t y = out / s.out_width() * s.stride + k / s.kernel - s.padding;
  const int64_t x = out % s.out_width() * s.stride + k % s.kernel - s.padding;
  return y < 0 || y >= s.height || x < 0 || x >= s.width ? -1 : y * s.width + x;
}

TEST_P(ImageKernelsTest, GatherAndAddAreTransposes) {
  for_each_type([]<typename T>(const ImageKernels<T>& k) {
    for (const WindowShape& s : kWindows) {
      const int64_t window = s.kernel * s.kernel;
      const int64_t outputs = s.out_height() * s.out_width();
      const Buffer<T> x(s.height * s.width * s.channels, 1), rows(outputs * window * s.channels, 2);
      Buffer<T> gathered(rows.size()), added(x.size(), 3);
      std::vector<Real> exact_rows, exact_added;
      for (int64_t i = 0; i < x.size(); ++i) exact_added.push_back(static_cast<const Buffer<T>&>(added)[i]);
      for (int64_t o = 0; o < outputs; ++o) {
        for (int64_t w = 0; w < window; ++w) {
          const int64_t pixel = input_pixel(s, o, w);
          for (int64_t c = 0; c < s.channels; ++c) {
            exact_rows.push_back(pixel < 0 ? 0 : x[pixel * s.channels + c]);
            if (pixel >= 0) exact_added[pixel * s.channels + c] += rows[(o * window + w) * s.channels + c];
          }
        }
      }
      k.gather_windows(x.data(), s, gathered.data());
      k.add_windows(rows.data(), s, added.data());
      expect_close(gathered, exact_rows, 0, 1, "rows");
      expect_close(added, exact_added, static_cast<double>(window) + 1, 40, "added");
    }
  });
}

TEST_P(ImageKernelsTest, MaxPoolTakesTheFirstLargest) {
  for_each_type([]<typename T>(const ImageKernels<T>& k) {
    for (const WindowShape& s : kWindows) {
      const int64_t outputs = s.out_height() * s.out_width();
      Buffer<T> x(s.height * s.width * s.channels, 1), y(outputs * s.channels), dx(x.size(), 0, 0);
      for (int64_t i = 0; i < x.size(); ++i) x[i] = std::round(x[i]);  // creates equal numbers
      x[0] = std::numeric_limits<T>::quiet_NaN();
      const Buffer<T> dy(y.size(), 2);
      std::vector<uint8_t> where(outputs * s.channels + 1, 77);
      k.max_pool(x.data(), s, y.data(), where.data());
      EXPECT_TRUE(y.guard_intact());
      EXPECT_EQ(where.back(), 77);
      std::vector<Real> exact_dx(x.size(), 0);
      for (int64_t o = 0; o < outputs; ++o) {
        for (int64_t c = 0; c < s.channels; ++c) {
          int64_t best = -1;
          int64_t best_pixel = -1;
          for (int64_t w = 0; w < s.kernel * s.kernel; ++w) {
            const int64_t pixel = input_pixel(s, o, w);
            if (pixel < 0) continue;
            const T number = x[pixel * s.channels + c];
            if (best < 0 || number > x[best_pixel * s.channels + c] || std::isnan(number)) {
              best = w;
              best_pixel = pixel;
            }
          }
          const int64_t at = o * s.channels + c;
          ASSERT_EQ(where[at], best);
          const T expected = x[best_pixel * s.channels + c];
          ASSERT_TRUE(y[at] == expected || (std::isnan(y[at]) && std::isnan(expected)));
          exact_dx[best_pixel * s.channels + c] += dy[at];
        }
      }
      k.max_pool_backward(dy.data(), where.data(), s, dx.data());
      expect_close(dx, exact_dx, static_cast<double>(s.kernel * s.kernel), 40, "dx");
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Nn, ImageKernelsTest, testing::ValuesIn(kernel_sets(image_kernels_tables())),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace twobp::TWOBP_FILE
