// Compares the kernels of the scan and the convolution for every instruction set that this CPU supports with plain
// loops in long double: sizes around vector widths, chunks and groups, separated rows, in-place calls, extreme inputs.
#include "twobp/nn/kernels/scan/scan_kernels.h"

#include <cmath>
#include <cstdlib>
#include <memory>

#include "tests/nn/kernel_test_util.h"

namespace twobp::TWOBP_FILE {
namespace {

using namespace test;

class ScanKernelsTest : public KernelFamilyTest<ScanKernels> {};

struct FreeMemory {
  void operator()(void* memory) const { std::free(memory); }
};
template <typename T>
std::unique_ptr<void, FreeMemory> make_scratch(const ScanKernels<T>& k, const ScanSize& size) {
  const auto bytes = (static_cast<size_t>(k.scratch_bytes(size)) + 63) / 64 * 64;
  return std::unique_ptr<void, FreeMemory>(std::aligned_alloc(64, bytes));
}

// One sequence. x and z are the halves of one matrix, and so are B and C.
template <typename T>
struct ScanData {
  explicit ScanData(ScanSize size, double scale = 1)
      : size(size),
        xz(size.sequence * 2 * size.channels, 1, scale),
        raw(size.sequence * size.channels, 2, scale),
        bc(size.sequence * 2 * size.state, 3),
        a(size.state * size.channels, 4),
        d(size.channels, 5),
        bias(size.channels, 6),
        dout(size.sequence * size.channels, 7),
        out(size.sequence * size.channels),
        borders(std::max<int64_t>(1, size.borders() * size.state * size.channels)),
        dbc(size.groups() * size.sequence * 2 * size.state),
        da(size.state * size.channels),
        dd(size.channels),
        dbias(size.channels) {
    for (int64_t i = 0; i < a.size(); ++i) a[i] = static_cast<T>(-std::exp(0.5 * static_cast<double>(a[i])));
  }

  ScanInput<T> input() {
    const int64_t c = size.channels;
    return {size,
            {xz.data(), 2 * c},
            {raw.data(), c},
            {xz.data() + c, 2 * c},
            {bc.data(), 2 * size.state},
            {bc.data() + size.state, 2 * size.state},
            a.data(),
            d.data(),
            bias.data()};
  }

  void forward(const ScanKernels<T>& k, void* scratch, const T* initial = nullptr, T* final = nullptr) {
    const ScanOutput<T> to = {{out.data(), size.channels}, borders.data(), initial, final};
    for_groups([&](int64_t begin, int64_t end) { k.scan_forward(input(), to, begin, end, scratch); });
  }
  // dx overwrites dout, draw overwrites raw, and dz overwrites z.
  void backward(const ScanKernels<T>& k, void* scratch) {
    const int64_t c = size.channels;
    for_groups([&](int64_t begin, int64_t end) {
      const ScanGradient<T> to = {{dout.data(), c},
                                  borders.data(),
                                  {dout.data(), c},
                                  {raw.data(), c},
                                  {xz.data() + c, 2 * c},
                                  dbc.data() + begin / kScanGroup * size.sequence * 2 * size.state,
                                  da.data(),
                                  dd.data(),
                                  dbias.data()};
      k.scan_backward(input(), to, begin, end, scratch);
    });
  }
  template <typename Body>
  void for_groups(Body&& body) {
    for (int64_t begin = 0; begin < size.channels; begin += kScanGroup) {
      body(begin, std::min(begin + kScanGroup, size.channels));
    }
  }

  ScanSize size;
  Buffer<T> xz, raw, bc, a, d, bias, dout, out, borders, dbc, da, dd, dbias;
};

// The definition in long double. A is the kernels' a times ln(2).
struct ExactScan {
  template <typename T>
  explicit ExactScan(const ScanData<T>& s) {
    const int64_t channels = s.size.channels;
    const int64_t state = s.size.state;
    const int64_t sequence = s.size.sequence;
    out.resize(sequence * channels);
    dx = draw = dz = out;
    dbc.resize(sequence * 2 * state);
    da.resize(state * channels);
    for (int64_t c = 0; c < channels; ++c) {
      std::vector<Real> h((sequence + 1) * state), decay(sequence * state), delta(sequence), y(sequence);
      const auto x = [&](int64_t t) { return s.xz[t * 2 * channels + c]; };
      const auto z = [&](int64_t t) { return s.xz[t * 2 * channels + channels + c]; };
      const auto b = [&](int64_t t, int64_t n) { return s.bc[t * 2 * state + n]; };
      const auto cc = [&](int64_t t, int64_t n) { return s.bc[(t * 2 + 1) * state + n]; };
      const auto sigmoid = [](Real v) { return 1 / (1 + std::exp(-v)); };
      const auto a = [&](int64_t n) { return s.a[n * channels + c] * std::log(Real(2)); };
      for (int64_t t = 0; t < sequence; ++t) {
        const Real v = s.raw[t * channels + c] + s.bias[c];
        delta[t] = std::max(v, Real(0)) + std::log1p(std::exp(-std::abs(v)));
        y[t] = s.d[c] * x(t);
        for (int64_t n = 0; n < state; ++n) {
          decay[t * state + n] = std::exp(delta[t] * a(n));
          h[(t + 1) * state + n] = decay[t * state + n] * h[t * state + n] + delta[t] * b(t, n) * x(t);
          y[t] += cc(t, n) * h[(t + 1) * state + n];
        }
        out[t * channels + c] = y[t] * z(t) * sigmoid(z(t));
      }
      std::vector<Real> after(state);  // dL/dh from the later positions
      Real dd_sum = 0;
      Real dbias_sum = 0;
      for (int64_t t = sequence - 1; t >= 0; --t) {
        const Real gate = sigmoid(z(t));
        const Real dout = s.dout[t * channels + c];
        const Real dy = dout * z(t) * gate;
        Real ddelta = 0;
        dz[t * channels + c] = dout * y[t] * gate * (1 + z(t) * (1 - gate));
        dx[t * channels + c] = dy * s.d[c];
        for (int64_t n = 0; n < state; ++n) {
          const Real gradient = dy * cc(t, n) + after[n];
          const Real carried = decay[t * state + n] * h[t * state + n];
          dx[t * channels + c] += delta[t] * gradient * b(t, n);
          ddelta += x(t) * gradient * b(t, n) + gradient * carried * a(n);
          da[n * channels + c] += gradient * carried * delta[t];
          dbc[t * 2 * state + n] += gradient * delta[t] * x(t);
          dbc[(t * 2 + 1) * state + n] += dy * h[(t + 1) * state + n];
          after[n] = decay[t * state + n] * gradient;
        }
        draw[t * channels + c] = ddelta * sigmoid(s.raw[t * channels + c] + s.bias[c]);
        dd_sum += dy * x(t);
        dbias_sum += draw[t * channels + c];
      }
      dd.push_back(dd_sum);
      dbias.push_back(dbias_sum);
    }
  }
  std::vector<Real> out, dx, draw, dz, dbc, da, dd, dbias;
};

const std::vector<ScanSize> kSizes = {{1, 1, 1},   {2, 7, 3},    {5, 17, 16},  {31, 33, 2},
                                      {32, 16, 4}, {33, 257, 5}, {97, 131, 9}, {64, 512, 16}};

TEST_P(ScanKernelsTest, ScanForwardAndBackward) {
  for_each_type([]<typename T>(const ScanKernels<T>& k) {
    for (const ScanSize& size : kSizes) {
      SCOPED_TRACE(std::to_string(size.sequence) + " x " + std::to_string(size.channels) + " x " +
                   std::to_string(size.state));
      ScanData<T> s(size);
      const ExactScan exact(s);
      const auto scratch = make_scratch(k, size);
      s.forward(k, scratch.get());
      // The recurrence in both directions, sums over states, and 30 operations for softplus, sigmoid and gate. dB and
      // dC are sums over channels. The parameters' gradients are sums over positions.
      const auto positions = static_cast<double>(size.sequence);
      const double roundings = 10 * positions + 2 * static_cast<double>(size.state) + 30;
      const auto channels = static_cast<double>(size.channels);
      expect_close(s.out, exact.out, roundings, largest(exact.out), "out");
      s.backward(k, scratch.get());
      expect_close(s.dout, exact.dx, roundings, largest(exact.dx), "dx");
      expect_close(s.raw, exact.draw, roundings, largest(exact.draw), "draw");
      expect_close(s.da, exact.da, roundings + positions, largest(exact.da), "da");
      expect_close(s.dd, exact.dd, roundings + positions, largest(exact.dd), "dd");
      expect_close(s.dbias, exact.dbias, roundings + positions, largest(exact.dbias), "dbias");
      const ScanData<T> before(size);
      std::vector<Real> xz;
      Buffer<T> dbc(size.sequence * 2 * size.state);
      for (int64_t i = 0; i < dbc.size(); ++i) {
        Real sum = 0;
        for (int64_t group = 0; group < size.groups(); ++group) {
          sum += const_cast<const Buffer<T>&>(s.dbc)[group * dbc.size() + i];
        }
        dbc[i] = static_cast<T>(sum);
      }
      expect_close(dbc, exact.dbc, roundings + channels, largest(exact.dbc), "dB, dC");
      for (int64_t t = 0; t < size.sequence; ++t) {  // x is unchanged, z becomes dz
        for (int64_t c = 0; c < size.channels; ++c) xz.push_back(before.xz[t * 2 * size.channels + c]);
        for (int64_t c = 0; c < size.channels; ++c) xz.push_back(exact.dz[t * size.channels + c]);
      }
      expect_close(s.xz, xz, roundings, largest(exact.dz), "(x | dz)");
      EXPECT_TRUE(s.dbc.guard_intact() && s.borders.guard_intact());
    }
  });
}

// Two halves of a sequence, where the second starts with the last states of the first. The result equals the whole, bit
// for bit if a chunk ends there.
TEST_P(ScanKernelsTest, GoesOnFromStates) {
  for_each_type([]<typename T>(const ScanKernels<T>& k) {
    const ScanSize size = {kScanChunk + 9, 21, 3};
    ScanData<T> whole(size);
    const auto scratch = make_scratch(k, size);
    whole.forward(k, scratch.get());
    ScanData<T> first(size);
    first.size.sequence = kScanChunk;
    Buffer<T> states(size.state * size.channels);
    first.forward(k, scratch.get(), nullptr, states.data());
    ScanData<T> second(size);
    ScanInput<T> rest = second.input();
    rest.size.sequence = 9;
    for (auto* rows : {&rest.x, &rest.delta, &rest.z, &rest.b, &rest.c}) rows->data += kScanChunk * rows->stride;
    const ScanOutput<T> to = {
        {second.out.data() + kScanChunk * size.channels, size.channels}, nullptr, states.data(), states.data()};
    k.scan_forward(rest, to, 0, size.channels, scratch.get());
    for (int64_t i = 0; i < whole.out.size(); ++i) {
      const bool early = i < kScanChunk * size.channels;
      ASSERT_EQ(whole.out[i], early ? first.out[i] : second.out[i]) << i;
    }
    EXPECT_TRUE(states.guard_intact());
  });
}

// Extreme steps and gates: states decay to nothing, softplus gets large numbers, sigmoids are 0 and 1. Nothing may
// overflow.
TEST_P(ScanKernelsTest, LargeInputs) {
  for_each_type([]<typename T>(const ScanKernels<T>& k) {
    const ScanSize size = {40, 19, 4};
    ScanData<T> s(size, 100);
    const ExactScan exact(s);
    const auto scratch = make_scratch(k, size);
    s.forward(k, scratch.get());
    // exp turns the rounding of an argument of 500 into 500 roundings.
    expect_close(s.out, exact.out, 1500, largest(exact.out), "out");
    s.backward(k, scratch.get());
    expect_close(s.dout, exact.dx, 1500, largest(exact.dx), "dx");
    expect_close(s.raw, exact.draw, 1500, largest(exact.draw), "draw");
  });
}

TEST_P(ScanKernelsTest, NanStays) {
  for_each_type([]<typename T>(const ScanKernels<T>& k) {
    const ScanSize size = {3, 5, 2};
    for (int which = 0; which < 3; ++which) {
      ScanData<T> s(size);
      const T nan = std::numeric_limits<T>::quiet_NaN();
      (which == 0 ? s.raw[5 + 1] : s.xz[10 + (which == 1 ? 1 : 6)]) = nan;
      const auto scratch = make_scratch(k, size);
      s.forward(k, scratch.get());
      EXPECT_TRUE(std::isnan(static_cast<double>(s.out[5 + 1]))) << which;
      EXPECT_FALSE(std::isnan(static_cast<double>(s.out[5 + 2]))) << which;
    }
  });
}

struct ConvSize {
  int64_t sequence, channels, kernel;
};

TEST_P(ScanKernelsTest, ConvolutionForwardAndBackward) {
  for_each_type([]<typename T>(const ScanKernels<T>& k) {
    for (const ConvSize& size : {ConvSize{1, 1, 1}, {1, 5, 4}, {3, 17, 4}, {9, 33, 16}, {20, 259, 4}, {7, 512, 2}}) {
      const auto& [sequence, channels, kernel] = size;
      Buffer<T> x(sequence * 2 * channels, 1), weight(kernel * channels, 2), bias(channels, 3),
          dy(sequence * channels, 4), y(sequence * channels), dw(kernel * channels), dbias(channels);
      std::vector<Real> exact_y, exact_dx(sequence * 2 * channels), exact_dw(kernel * channels), exact_dbias(channels);
      const Buffer<T> start = x;
      for (int64_t i = 0; i < start.size(); ++i) {
        if (i / channels % 2 == 1) exact_dx[i] = start[i];  // the other half
      }
      const auto of = [](const Buffer<T>& buffer, int64_t i) { return buffer[i]; };
      for (int64_t t = 0; t < sequence; ++t) {
        for (int64_t c = 0; c < channels; ++c) {
          Real sum = of(bias, c);
          for (int64_t j = 0; j < kernel && j <= t; ++j) {
            sum += of(weight, (kernel - 1 - j) * channels + c) * start[(t - j) * 2 * channels + c];
          }
          const Real gate = 1 / (1 + std::exp(-sum));
          exact_y.push_back(sum * gate);
          const Real dsum = of(dy, t * channels + c) * gate * (1 + sum * (1 - gate));
          exact_dbias[c] += dsum;
          for (int64_t j = 0; j < kernel && j <= t; ++j) {
            exact_dw[(kernel - 1 - j) * channels + c] += dsum * start[(t - j) * 2 * channels + c];
            exact_dx[(t - j) * 2 * channels + c] += dsum * of(weight, (kernel - 1 - j) * channels + c);
          }
        }
      }
      const ConvInput<T> in = {sequence, channels, kernel, {x.data(), 2 * channels}, weight.data(), bias.data()};
      k.conv_forward(in, {y.data(), channels}, 0, sequence / 2);
      k.conv_forward(in, {y.data(), channels}, sequence / 2, sequence);
      for (int64_t begin = 0; begin < channels; begin += kScanGroup) {
        k.conv_backward(in, {dy.data(), channels}, {x.data(), 2 * channels}, dw.data(), dbias.data(), begin,
                        std::min(begin + kScanGroup, channels));
      }
      const double roundings = 2 * static_cast<double>(kernel) + 16;
      const double rows = static_cast<double>(sequence);
      expect_close(y, exact_y, roundings, largest(exact_y), "y");
      expect_close(x, exact_dx, roundings, largest(exact_dx), "dx");
      expect_close(dw, exact_dw, roundings + rows, largest(exact_dw), "dw");
      expect_close(dbias, exact_dbias, roundings + rows, largest(exact_dbias), "dbias");
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Sets, ScanKernelsTest, testing::ValuesIn(kernel_sets(scan_kernels_tables())),
                         [](const testing::TestParamInfo<KernelSetOf<ScanKernels>>& info) { return info.param.name; });

}  // namespace
}  // namespace twobp::TWOBP_FILE
