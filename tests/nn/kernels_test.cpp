// Compares the kernels for every instruction set that this CPU supports, in float and double, with plain loops in long
// double: sizes around vector widths, in-place calls, split rows, large numbers, NaN. Buffers are unaligned and end
// with a guard.
#include <cmath>
#include <cstdint>

#include "tests/nn/kernel_test_util.h"

namespace twobp::TWOBP_FILE {
namespace {

using namespace test;

class KernelsTest : public KernelFamilyTest<Kernels> {};

constexpr double kEps = 1e-2;

template <typename T>
struct RmsNormData {
  explicit RmsNormData(Shape shape)
      : shape(shape),
        x(shape.rows * shape.cols, 1),
        dy(shape.rows * shape.cols, 2),
        gain(shape.cols, 3),
        y(shape.rows * shape.cols),
        rstd(shape.rows) {}

  Real exact_rstd(int64_t r) const {
    Real sum = 0;
    for (int64_t c = 0; c < shape.cols; ++c) sum += x_at(r, c) * x_at(r, c);
    return 1 / std::sqrt(sum / Real(shape.cols) + Real(kEps));
  }
  Real x_at(int64_t r, int64_t c) const { return static_cast<const Buffer<T>&>(x)[r * shape.cols + c]; }
  Real dy_at(int64_t r, int64_t c) const { return static_cast<const Buffer<T>&>(dy)[r * shape.cols + c]; }
  Real gain_at(int64_t c) const { return static_cast<const Buffer<T>&>(gain)[c]; }

  Shape shape;
  Buffer<T> x, dy, gain, y, rstd;
};

TEST_P(KernelsTest, RmsNormForward) {
  for_each_type([]<typename T>(const Kernels<T>& k) {
    for (const Shape shape : kShapes) {
      RmsNormData<T> d(shape);
      k.rms_norm_forward(d.x.data(), d.gain.data(), d.y.data(), d.rstd.data(), shape.rows, shape.cols, kEps);
      std::vector<Real> y, rstd;
      for (int64_t r = 0; r < shape.rows; ++r) {
        rstd.push_back(d.exact_rstd(r));
        for (int64_t c = 0; c < shape.cols; ++c) y.push_back(d.x_at(r, c) * rstd[r] * d.gain_at(c));
      }
      const double roundings = static_cast<double>(shape.cols) + 8;  // the sum of squares, then 8 operations
      expect_close(d.rstd, rstd, roundings, largest(rstd), "rstd");
      expect_close(d.y, y, roundings, largest(y), "y");
    }
  });
}

TEST_P(KernelsTest, RmsNormBackward) {
  for_each_type([]<typename T>(const Kernels<T>& k) {
    for (const Shape shape : kShapes) {
      RmsNormData<T> d(shape);
      k.rms_norm_forward(d.x.data(), d.gain.data(), d.y.data(), d.rstd.data(), shape.rows, shape.cols, kEps);
      Buffer<T> dx(shape.rows * shape.cols);
      Buffer<T> dgain(shape.cols, 4);  // the kernel adds to it
      std::vector<Real> exact_dx, exact_dgain;
      for (int64_t c = 0; c < shape.cols; ++c) exact_dgain.push_back(static_cast<const Buffer<T>&>(dgain)[c]);
      Real size = 0;  // of the terms whose difference is dx
      for (int64_t r = 0; r < shape.rows; ++r) {
        const Real rstd = d.exact_rstd(r);
        Real mean = 0;
        for (int64_t c = 0; c < shape.cols; ++c) {
          mean += d.dy_at(r, c) * d.gain_at(c) * d.x_at(r, c) * rstd / Real(shape.cols);
          exact_dgain[c] += d.dy_at(r, c) * d.x_at(r, c) * rstd;
        }
        for (int64_t c = 0; c < shape.cols; ++c) {
          const Real g = d.dy_at(r, c) * d.gain_at(c);
          exact_dx.push_back(rstd * (g - d.x_at(r, c) * rstd * mean));
          size = std::max(size, rstd * (std::abs(g) + std::abs(d.x_at(r, c) * rstd * mean)));
        }
      }
      k.rms_norm_backward(d.dy.data(), d.x.data(), d.gain.data(), d.rstd.data(), dx.data(), dgain.data(), shape.rows,
                          shape.cols);
      // Two sums per row (for rstd and the mean), and 16 operations.
      expect_close(dx, exact_dx, 2 * static_cast<double>(shape.cols) + 16, static_cast<double>(size), "dx");
      expect_close(dgain, exact_dgain, static_cast<double>(shape.rows + shape.cols) + 12, largest(exact_dgain) + 1,
                   "dgain");
      // dx written over dy and over x: the bits must be the same.
      for (const bool over_dy : {true, false}) {
        RmsNormData<T> in_place(shape);
        Buffer<T> unused(shape.cols);
        Buffer<T>& target = over_dy ? in_place.dy : in_place.x;
        k.rms_norm_backward(in_place.dy.data(), in_place.x.data(), d.gain.data(), d.rstd.data(), target.data(),
                            unused.data(), shape.rows, shape.cols);
        EXPECT_TRUE(target == dx) << "dx over " << (over_dy ? "dy" : "x");
      }
    }
  });
}

TEST_P(KernelsTest, RopeRotatesAndBackwardTurnsBack) {
  for_each_type([]<typename T>(const Kernels<T>& k) {
    constexpr int64_t kPositions = 5, kHeads = 3, kRotated = 2, kRows = 12;
    for (const int64_t half : {1, 3, 8, 17}) {
      const int64_t head = 2 * half;
      const int64_t stride = kHeads * head;
      Buffer<T> cos(kPositions * half), sin(kPositions * half);
      for (int64_t i = 0; i < kPositions * half; ++i) {
        cos[i] = static_cast<T>(std::cos(0.37 * static_cast<double>(i)));
        sin[i] = static_cast<T>(std::sin(0.37 * static_cast<double>(i)));
      }
      const Buffer<T> start(kRows * stride, 1);
      Buffer<T> x = start;
      // In two calls, as two threads would do it.
      k.rope(x.data(), cos.data(), sin.data(), 1, 7, 0, stride, kRotated, head, half, kPositions);
      k.rope(x.data() + 7 * stride, cos.data(), sin.data(), 1, kRows - 7, 7, stride, kRotated, head, half, kPositions);
      std::vector<Real> expected;
      for (int64_t r = 0; r < kRows; ++r) {
        for (int64_t i = 0; i < stride; ++i) {
          const int64_t in_head = i % head;
          const int64_t angle = r % kPositions * half + in_head % half;
          const Real c = static_cast<const Buffer<T>&>(cos)[angle];
          const Real s = static_cast<const Buffer<T>&>(sin)[angle];
          const Real own = start[r * stride + i];
          const bool left = in_head < half;
          const Real other = start[r * stride + (left ? i + half : i - half)];
          expected.push_back(i / head < kRotated ? own * c + (left ? -other : other) * s : own);
        }
      }
      expect_close(x, expected, 4, 2 * largest(expected), "rotated");
      // The backward pass rotates back to the original numbers.
      Buffer<T> back = x;
      k.rope(back.data(), cos.data(), sin.data(), -1, 7, 0, stride, kRotated, head, half, kPositions);
      k.rope(back.data() + 7 * stride, cos.data(), sin.data(), -1, kRows - 7, 7, stride, kRotated, head, half,
             kPositions);
      std::vector<Real> before;
      for (int64_t i = 0; i < kRows * stride; ++i) before.push_back(start[i]);
      expect_close(back, before, 16, 2 * largest(expected), "turned back");
    }
  });
}

Real exact_sigmoid(Real x) {
  return 1 / (1 + std::exp(-x));
}

TEST_P(KernelsTest, SwiGlu) {
  for_each_type([]<typename T>(const Kernels<T>& k) {
    for (const Shape shape : kShapes) {
      const Buffer<T> x(shape.rows * 2 * shape.cols, 1, 3);
      const Buffer<T> dact(shape.rows * shape.cols, 2);
      Buffer<T> act(shape.rows * shape.cols), dx(shape.rows * 2 * shape.cols);
      std::vector<Real> exact_act, exact_dx(shape.rows * 2 * shape.cols);
      for (int64_t r = 0; r < shape.rows; ++r) {
        for (int64_t c = 0; c < shape.cols; ++c) {
          const int64_t gate = r * 2 * shape.cols + c;
          const Real g = x[gate];
          const Real u = x[gate + shape.cols];
          const Real s = exact_sigmoid(g);
          const Real d = dact[r * shape.cols + c];
          exact_act.push_back(g * s * u);
          exact_dx[gate] = d * u * (s + g * s * (1 - s));
          exact_dx[gate + shape.cols] = d * g * s;
        }
      }
      k.swiglu_forward(x.data(), 2 * shape.cols, act.data(), shape.rows, shape.cols);
      k.swiglu_backward(x.data(), 2 * shape.cols, dact.data(), dx.data(), 2 * shape.cols, shape.rows, shape.cols);
      // exp is within 4 ulp (8 roundings), plus 8 operations. g s (1 - s) loses up to |g| <= 12 roundings because of 1
      // - s.
      expect_close(act, exact_act, 16, largest(exact_act), "act");
      expect_close(dx, exact_dx, 32, largest(exact_dx), "dx");
      Buffer<T> in_place = x;
      k.swiglu_backward(in_place.data(), 2 * shape.cols, dact.data(), in_place.data(), 2 * shape.cols, shape.rows,
                        shape.cols);
      EXPECT_TRUE(in_place == dx) << "dx over x";
    }
  });
}

// The gates are so large that exp overflows. Then silu(g) is g or 0, and its derivative is 1 or 0.
TEST_P(KernelsTest, SwiGluWithLargeGates) {
  for_each_type([]<typename T>(const Kernels<T>& k) {
    constexpr int64_t kCols = 19;
    Buffer<T> x(2 * kCols), dact(kCols), act(kCols), dx(2 * kCols);
    for (int64_t c = 0; c < kCols; ++c) {
      x[c] = c % 2 == 0 ? T(2000) : T(-2000);
      x[kCols + c] = 3;
      dact[c] = 5;
    }
    k.swiglu_forward(x.data(), 2 * kCols, act.data(), 1, kCols);
    k.swiglu_backward(x.data(), 2 * kCols, dact.data(), dx.data(), 2 * kCols, 1, kCols);
    for (int64_t c = 0; c < kCols; ++c) {
      EXPECT_EQ(act[c], c % 2 == 0 ? T(6000) : T(0));
      EXPECT_EQ(dx[c], c % 2 == 0 ? T(15) : T(0));
      EXPECT_EQ(dx[kCols + c], c % 2 == 0 ? T(10000) : T(0));
    }
  });
}

constexpr int64_t kIgnore = -100;

// Logits around `shift` with deviation `spread`. Rows of losses and gradients are compared with the definition.
template <typename T>
void check_cross_entropy(const Kernels<T>& k, Shape shape, double shift, double spread) {
  constexpr double kScale = 0.3;
  Buffer<T> logits(shape.rows * shape.cols, 1, spread);
  for (int64_t i = 0; i < logits.size(); ++i) logits[i] += static_cast<T>(shift);
  const Buffer<T> start = logits;
  std::vector<int64_t> targets;
  for (int64_t r = 0; r < shape.rows; ++r) targets.push_back(r % 4 == 1 ? kIgnore : (r * 7 + 3) % shape.cols);
  std::vector<Real> exact_loss, exact;
  // The range of the logits of a row. exp turns an error of u * range in its argument into that many roundings.
  Real range = 0;
  for (int64_t r = 0; r < shape.rows; ++r) {
    Real most = start[r * shape.cols];
    for (int64_t c = 0; c < shape.cols; ++c) most = std::max(most, start[r * shape.cols + c]);
    Real sum = 0;
    for (int64_t c = 0; c < shape.cols; ++c) {
      sum += std::exp(start[r * shape.cols + c] - most);
      range = std::max(range, most - start[r * shape.cols + c]);
    }
    const bool counted = targets[r] != kIgnore;
    exact_loss.push_back(counted ? std::log(sum) + most - start[r * shape.cols + targets[r]] : 0);
    for (int64_t c = 0; c < shape.cols; ++c) {
      const Real p = std::exp(start[r * shape.cols + c] - most) / sum;
      exact.push_back(counted ? (p - (c == targets[r] ? 1 : 0)) * Real(kScale) : 0);
    }
  }
  const double roundings = static_cast<double>(shape.cols) + static_cast<double>(std::min<Real>(range, 100)) + 16;
  const auto check_loss = [&](const Buffer<double>& loss) {
    const double size = largest(exact_loss) + 1;
    for (int64_t r = 0; r < shape.rows; ++r) {
      ASSERT_TRUE(std::abs(loss[r] - exact_loss[r]) <= roundings * std::numeric_limits<T>::epsilon() / 2 * size)
          << "loss of row " << r << ": " << loss[r] << ", expected " << exact_loss[r];
    }
    EXPECT_TRUE(loss.guard_intact());
  };
  Buffer<double> loss(shape.rows);
  // The same with a gap between the rows. The gap must not change.
  constexpr int64_t kGap = 3;
  Buffer<T> apart(shape.rows * (shape.cols + kGap), 2);
  for (int64_t r = 0; r < shape.rows; ++r)
    std::copy_n(logits.data() + r * shape.cols, shape.cols, apart.data() + r * (shape.cols + kGap));
  const Buffer<T> apart_start = apart;
  const auto run = [&](Buffer<T>& x, int64_t stride, bool gradient) {
    k.cross_entropy(x.data(), stride, targets.data(), loss.data(), shape.rows, shape.cols, kIgnore, kScale, gradient);
    check_loss(loss);
  };
  run(logits, shape.cols, false);
  EXPECT_TRUE(logits == start) << "logits change without `gradient`";
  run(logits, shape.cols, true);
  expect_close(logits, exact, roundings, kScale, "gradient");
  run(apart, shape.cols + kGap, true);
  for (int64_t i = 0; i < apart.size(); ++i) {
    const int64_t r = i / (shape.cols + kGap), c = i % (shape.cols + kGap);
    ASSERT_EQ(apart[i], c < shape.cols ? logits[r * shape.cols + c] : apart_start[i]) << r << ", " << c;
  }
  for (int64_t i = 0; i < logits.size(); ++i) {
    if (targets[i / shape.cols] == kIgnore) {
      EXPECT_EQ(logits[i], T(0));
    }
  }
}

TEST_P(KernelsTest, CrossEntropy) {
  for_each_type([]<typename T>(const Kernels<T>& k) {
    for (const Shape shape : kShapes) check_cross_entropy(k, shape, 0, 2);
  });
}

// exp of each of these overflows or vanishes in float. exp of the last two does so in double too.
TEST_P(KernelsTest, CrossEntropyWithLargeLogits) {
  for_each_type([]<typename T>(const Kernels<T>& k) {
    for (const Shape shape : kShapes) {
      check_cross_entropy(k, shape, 500, 2);
      check_cross_entropy(k, shape, -500, 2);
      check_cross_entropy(k, shape, 0, 1e4);
      check_cross_entropy(k, shape, 1e6, 1e5);
    }
  });
}

TEST_P(KernelsTest, AddRows) {
  for_each_type([]<typename T>(const Kernels<T>& k) {
    for (const Shape shape : kShapes) {
      const Buffer<T> x(shape.rows * shape.cols, 1), row(shape.cols, 2);
      Buffer<T> sums = row, added = x;
      std::vector<Real> exact;
      for (int64_t c = 0; c < shape.cols; ++c) exact.push_back(row[c]);
      for (int64_t i = 0; i < x.size(); ++i) exact[i % shape.cols] += x[i];
      k.add_rows(x.data(), shape.cols, sums.data(), shape.rows, shape.cols);
      expect_close(sums, exact, 2 * static_cast<double>(shape.rows), std::max(1.0, largest(exact)), "sums");
      k.add_row(added.data(), shape.cols, row.data(), shape.rows, shape.cols);
      EXPECT_TRUE(added.guard_intact());
      for (int64_t i = 0; i < x.size(); ++i) {
        ASSERT_EQ(added[i], x.data()[i] + row.data()[i % shape.cols]);  // equal bit for bit
      }
    }
  });
}

TEST_P(KernelsTest, SumOfSquares) {
  for_each_type([]<typename T>(const Kernels<T>& k) {
    for (const int64_t n : {0, 1, 7, 33, 4095, 4096, 4097, 20000}) {
      const Buffer<T> x(n, 1);
      Real exact = 0;
      for (int64_t i = 0; i < n; ++i) exact += x[i] * x[i];
      // At most 4096 additions per row in T, and one rounding in double per block.
      const Real bound = Real(4096) * Real(std::numeric_limits<T>::epsilon() / 2) * exact;
      EXPECT_TRUE(std::abs(Real(k.sum_of_squares(x.data(), n)) - exact) <= bound) << n;
    }
    Buffer<T> large(20000, 1);
    for (int64_t i = 0; i < large.size(); ++i) large[i] = 1;
    EXPECT_EQ(k.sum_of_squares(large.data(), large.size()), 20000) << "sums of ones are exact";
  });
}

// Rows may be split over calls anywhere with the same bits. A NaN appears in all results of its row that depend on it,
// and nowhere else.
TEST_P(KernelsTest, RowsAreIndependentAndNanPassesThrough) {
  for_each_type([]<typename T>(const Kernels<T>& k) {
    constexpr int64_t kRows = 5, kCols = 19, kBad = 3;
    const T nan = std::numeric_limits<T>::quiet_NaN();
    const std::vector<int64_t> targets = {0, 7, 18, 3, 1};
    // Runs every kernel on rows [begin, end) and returns one row of results per row.
    for (const int64_t bad_col : {0, 9, 18}) {
      const auto run = [&](bool with_nan, int64_t split) {
        Buffer<T> x(kRows * 2 * kCols, 1), gain(kCols, 2), dy(kRows * kCols, 3);
        if (with_nan) x[kBad * kCols + bad_col] = nan;
        Buffer<T> packed(kRows * 2 * kCols, 1);
        if (with_nan) packed[kBad * 2 * kCols + bad_col] = nan;
        Buffer<T> y(kRows * kCols), rstd(kRows), dx(kRows * kCols), act(kRows * kCols), dpacked(kRows * 2 * kCols);
        Buffer<T> dgain(kCols);
        Buffer<T> logits(kRows * kCols, 1);
        if (with_nan) logits[kBad * kCols + bad_col] = nan;
        Buffer<double> loss(kRows);
        for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, split}, {split, kRows}}) {
          const int64_t rows = end - begin;
          const int64_t at = begin * kCols;
          k.rms_norm_forward(x.data() + at, gain.data(), y.data() + at, rstd.data() + begin, rows, kCols, 1e-5);
          k.rms_norm_backward(dy.data() + at, x.data() + at, gain.data(), rstd.data() + begin, dx.data() + at,
                              dgain.data(), rows, kCols);
          k.swiglu_forward(packed.data() + 2 * at, 2 * kCols, act.data() + at, rows, kCols);
          k.swiglu_backward(packed.data() + 2 * at, 2 * kCols, dy.data() + at, dpacked.data() + 2 * at, 2 * kCols, rows,
                            kCols);
          k.cross_entropy(logits.data() + at, kCols, targets.data() + begin, loss.data() + begin, rows, kCols, kIgnore,
                          1.0, true);
        }
        std::vector<std::vector<double>> out(kRows);
        for (int64_t r = 0; r < kRows; ++r) {
          for (int64_t c = 0; c < kCols; ++c) {
            for (const T value : {y[r * kCols + c], dx[r * kCols + c], logits[r * kCols + c]}) out[r].push_back(value);
          }
          out[r].push_back(loss[r]);
          out[r].push_back(act[r * kCols + bad_col]);
          out[r].push_back(dpacked[r * 2 * kCols + bad_col]);
          out[r].push_back(dpacked[r * 2 * kCols + kCols + bad_col]);
        }
        return out;
      };
      const auto whole = run(false, kRows);
      EXPECT_EQ(run(false, 2), whole);
      const auto with_nan = run(true, kRows);
      for (int64_t r = 0; r < kRows; ++r) {
        if (r != kBad) {
          EXPECT_EQ(with_nan[r], whole[r]) << "row " << r;
          continue;
        }
        for (size_t i = 0; i < with_nan[r].size(); ++i) {
          EXPECT_TRUE(std::isnan(with_nan[r][i])) << "NaN at " << bad_col << " does not show in result " << i;
        }
      }
      Buffer<T> x(100, 1);
      x[bad_col] = nan;
      EXPECT_TRUE(std::isnan(k.sum_of_squares(x.data(), x.size())));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Nn, KernelsTest, testing::ValuesIn(kernel_sets(kernels_tables())),
                         [](const testing::TestParamInfo<KernelSet>& info) { return info.param.name; });

TEST(Kernels, TheBestInstructionSetIsPicked) {
  std::vector<KernelSet> sets = kernel_sets(kernels_tables());
  std::erase_if(sets, [](const KernelSet& set) { return !set.supported; });
  const KernelSet& best = sets.back();
  EXPECT_EQ(kernel_instruction_set(), best.name);
  EXPECT_EQ(&kernels<float>(), best.of_float);
  EXPECT_EQ(&kernels<double>(), best.of_double);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
