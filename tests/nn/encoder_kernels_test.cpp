// Tests BERT's kernels for every instruction set that this CPU supports, in float and double. Masks must be equal bit
// for bit. The other results are compared with plain loops in long double.
#include <numbers>

#include "tests/nn/kernel_test_util.h"
#include "twobp/nn/kernels/rows/row_kernels.h"

namespace twobp::TWOBP_FILE {
namespace {

using namespace test;

class EncoderKernelsTest : public KernelFamilyTest<EncoderKernels> {};

constexpr int64_t kRows = 3;
constexpr double kEps = 1e-3;

DropoutMask some_mask() {
  DropoutMask mask;
  mask.key[0] = 123;
  mask.key[1] = 456;
  mask.micro_batch = 7;
  mask.threshold = 20000;
  mask.scale = 1.5;
  return mask;
}

template <typename T>
Buffer<T> ones(int64_t size) {
  Buffer<T> all(size);
  for (int64_t i = 0; i < size; ++i) all[i] = 1;
  return all;
}

TEST_P(EncoderKernelsTest, MasksAreTheSameToTheBit) {
  const EncoderKernels<double>& baseline = encoder_kernels_tables().baseline.of_double;
  const DropoutMask mask = some_mask();
  for_each_type([&]<typename T>(const EncoderKernels<T>& k) {
    for (const int64_t cols : {1, 7, 8, 33, 1024, 2051}) {
      Buffer<T> y = ones<T>(kRows * cols);
      k.dropout(y.data(), nullptr, y.data(), kRows, cols, mask, 5);
      EXPECT_TRUE(y.guard_intact());
      Buffer<double> expected = ones<double>(kRows * cols);
      baseline.dropout(expected.data(), nullptr, expected.data(), kRows, cols, mask, 5);
      for (int64_t i = 0; i < y.size(); ++i) ASSERT_EQ(y[i], expected[i]) << cols << " " << i;
      // A subset of the rows gives the same results as among all rows.
      Buffer<T> last = ones<T>(cols);
      k.dropout(last.data(), nullptr, last.data(), 1, cols, mask, 5 + kRows - 1);
      for (int64_t c = 0; c < cols; ++c) ASSERT_EQ(last[c], y[(kRows - 1) * cols + c]) << cols << " " << c;
    }
  });
}

TEST_P(EncoderKernelsTest, DropoutAdds) {
  for_each_type([]<typename T>(const EncoderKernels<T>& k) {
    constexpr int64_t kCols = 33;
    const Buffer<T> x(kRows * kCols, 1), add(kRows * kCols, 2);
    for (const DropoutMask& mask : {DropoutMask{}, some_mask()}) {
      Buffer<T> y = x, kept = ones<T>(x.size());
      k.dropout(kept.data(), nullptr, kept.data(), kRows, kCols, mask, 5);
      k.dropout(y.data(), add.data(), y.data(), kRows, kCols, mask, 5);
      std::vector<Real> expected;
      for (int64_t i = 0; i < x.size(); ++i) expected.push_back(x[i] * kept[i] + add[i]);
      expect_close(y, expected, 2, largest(expected) + 4, "y");
    }
  });
}

struct Gelu {
  Real value, slope;
};

Gelu exact_gelu(Real x, GeluForm form) {
  constexpr Real kPi = std::numbers::pi_v<Real>;
  if (form == GeluForm::kErf) {
    const Real gate = std::erfc(-x / std::sqrt(Real(2))) / 2;
    return {x * gate, gate + x * std::exp(-x * x / 2) / std::sqrt(2 * kPi)};
  }
  const Real root = std::sqrt(2 / kPi);
  const Real t = std::tanh(root * (x + Real(0.044715) * x * x * x));
  return {x * (1 + t) / 2, (1 + t) / 2 + x * (1 - t * t) / 2 * root * (1 + 3 * Real(0.044715) * x * x)};
}

TEST_P(EncoderKernelsTest, GeluOverItsWholeRange) {
  for_each_type([]<typename T>(const EncoderKernels<T>& k) {
    constexpr int64_t kCount = 20001;
    const Real unit = std::numeric_limits<T>::epsilon() / 2;
    Buffer<T> x(kCount), dy = ones<T>(kCount);
    for (int64_t i = 0; i < kCount; ++i) x[i] = static_cast<T>(-14 + 28 * double(i) / (kCount - 1));
    const Buffer<T>& from = x;
    for (const GeluForm form : {GeluForm::kErf, GeluForm::kTanh}) {
      SCOPED_TRACE(form == GeluForm::kErf ? "erf" : "tanh");
      std::vector<Real> value, slope;
      for (int64_t i = 0; i < kCount; ++i) {
        const Gelu exact = exact_gelu(from[i], form);
        value.push_back(exact.value);
        slope.push_back(exact.slope);
      }
      Buffer<T> y(kCount), dx(kCount), act(kCount), again(kCount);
      k.gelu_forward(x.data(), y.data(), kCount, form);
      k.gelu_backward(x.data(), dy.data(), dx.data(), act.data(), kCount, form);
      k.gelu_backward(x.data(), dy.data(), again.data(), nullptr, kCount, form);
      expect_close(y, value, 16, largest(value), "y");
      expect_close(act, value, 16, largest(value), "act");
      // tanh's slope multiplies (1 - gate) by up to 61 before gate reaches 1. This amplifies two roundings of gate.
      const double of_slope = form == GeluForm::kTanh ? 16 + 2 * 61 : 16;
      expect_close(dx, slope, of_slope, largest(slope), "dx");
      expect_close(again, slope, of_slope, largest(slope), "dx without act");
      if (form == GeluForm::kTanh || std::is_same_v<T, double>) continue;
      // In float, the small results at x < 0 are accurate relative to their own size: exp of -x^2 / 2 rounds by x^2 / 2
      // units. (In double they come from 1 + erf, whose rounding is relative to 1.)
      const Buffer<T>&gelu = y, &gelu_again = act;
      for (int64_t i = 0; i < kCount; ++i) {
        const Real bound = std::abs(value[i]) * (16 + from[i] * from[i]) * unit + Real(1e-37);
        ASSERT_TRUE(std::abs(gelu[i] - value[i]) <= bound) << "y at " << from[i];
        ASSERT_TRUE(std::abs(gelu_again[i] - value[i]) <= bound) << "act at " << from[i];
      }
    }
  });
}

TEST_P(EncoderKernelsTest, LayerNorm) {
  for_each_type([]<typename T>(const EncoderKernels<T>& k) {
    for (const int64_t cols : {5, 33, 1030}) {
      SCOPED_TRACE(cols);
      Buffer<T> x(kRows * cols, 1), gain(cols, 2), bias(cols, 3), dy(kRows * cols, 4);
      for (int64_t i = 0; i < x.size(); ++i) x[i] += 3;
      Buffer<T> y(kRows * cols), mean(kRows), rstd(kRows), dx = dy, dgain(cols, 5), dbias(cols, 6);
      const Buffer<T>&from = x, &g = gain, &b = bias, &gradient = dy;
      std::vector<Real> exact_y, exact_dx, exact_dgain, exact_dbias;
      for (int64_t c = 0; c < cols; ++c) {
        exact_dgain.push_back(static_cast<const Buffer<T>&>(dgain)[c]);
        exact_dbias.push_back(static_cast<const Buffer<T>&>(dbias)[c]);
      }
      for (int64_t r = 0; r < kRows; ++r) {
        Real sum = 0, squares = 0, sum_g = 0, dot = 0;
        for (int64_t c = 0; c < cols; ++c) sum += from[r * cols + c];
        const Real middle = sum / Real(cols);
        for (int64_t c = 0; c < cols; ++c) {
          const Real off = from[r * cols + c] - middle;
          squares += off * off;
        }
        const Real scale = 1 / std::sqrt(squares / Real(cols) + Real(kEps));
        for (int64_t c = 0; c < cols; ++c) {
          const Real xhat = (from[r * cols + c] - middle) * scale, d = gradient[r * cols + c];
          exact_y.push_back(xhat * g[c] + b[c]);
          exact_dgain[c] += d * xhat;
          exact_dbias[c] += d;
          sum_g += d * g[c];
          dot += d * g[c] * xhat;
        }
        for (int64_t c = 0; c < cols; ++c) {
          const Real xhat = (from[r * cols + c] - middle) * scale;
          exact_dx.push_back(scale * (gradient[r * cols + c] * g[c] - sum_g / Real(cols) - xhat * dot / Real(cols)));
        }
      }
      const double roundings = static_cast<double>(2 * cols) + 40;
      k.layer_norm_forward(x.data(), gain.data(), bias.data(), y.data(), mean.data(), rstd.data(), kRows, cols, kEps);
      expect_close(y, exact_y, roundings, std::max(1.0, largest(exact_y)), "y");
      k.layer_norm_backward(dx.data(), x.data(), gain.data(), mean.data(), rstd.data(), dx.data(), dgain.data(),
                            dbias.data(), kRows, cols);
      expect_close(dx, exact_dx, roundings, std::max(1.0, largest(exact_dx)), "dx over dy");
      expect_close(dgain, exact_dgain, roundings, std::max(1.0, largest(exact_dgain)), "dgain");
      expect_close(dbias, exact_dbias, 2 * kRows, std::max(1.0, largest(exact_dbias)), "dbias");
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Nn, EncoderKernelsTest, testing::ValuesIn(kernel_sets(encoder_kernels_tables())),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace twobp::TWOBP_FILE
