// On a GPU, our kernels of rows and ATen's FlashAttention against the operators in float64 on a CPU.
#include <gtest/gtest.h>

#include "tests/nn/typed_options.h"
#include "twobp/nn/device/device.h"
#include "twobp/nn/kernels/attention/fused_attention.h"
#include "twobp/nn/kernels/cuda/rows_by_cuda.h"
#include "twobp/nn/kernels/operators.h"

namespace twobp::TWOBP_FILE {
namespace {

// The largest relative error of a norm, by dtype.
double tolerance(at::ScalarType type) {
  return type == at::kDouble ? 1e-13 : type == at::kFloat ? 1e-6 : type == at::kHalf ? 1e-3 : 8e-3;
}

void expect_close(const at::Tensor& actual, const at::Tensor& expected, double most,
                  const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  const at::Tensor error = actual.cpu().to(at::kDouble) - expected.to(at::kDouble);
  const double relative = (error.norm() / expected.to(at::kDouble).norm()).item<double>();
  EXPECT_LE(relative, most) << what;  // NaN is not
}

class CudaKernels : public ::testing::TestWithParam<std::tuple<at::ScalarType, int64_t>> {
 protected:
  void SetUp() override {
    if (!at::hasCUDA() || !rows_by_cuda())
      GTEST_SKIP() << "needs a GPU, and a build with nvcc and a LibTorch for CUDA";
    gpu_ = Device::open("cuda", 0).where();
  }
  // Random numbers that the dtype can hold, in float64.
  at::Tensor numbers(at::IntArrayRef sizes, int seed) const {
    auto generator = at::detail::createCPUGenerator(seed);
    return at::randn(sizes, generator, at::kDouble).to(type_).to(at::kDouble);
  }
  at::Tensor there(const at::Tensor& x) const { return x.to(gpu_, type_); }
  at::Tensor wide_there(const at::Tensor& x) const { return x.to(gpu_, compute_type(type_)); }
  at::Tensor like(const at::Tensor& x) const { return at::full_like(there(x), NAN); }
  void expect(const at::Tensor& actual, const at::Tensor& expected, const char* what) const {
    expect_close(actual, expected, tolerance(type_), what);
  }

  at::ScalarType type_ = std::get<0>(GetParam());
  int64_t cols_ = std::get<1>(GetParam());
  at::Device gpu_ = at::kCPU;
};

TEST_P(CudaKernels, NormRows) {
  const at::Tensor x = numbers({3, 45, cols_}, 1), dy = numbers({3, 45, cols_}, 2);
  const at::Tensor gain = numbers({cols_}, 3);
  at::Tensor y = at::empty_like(x), rstd = at::empty({135}, at::kDouble), dx = at::empty_like(x);
  operators::rms_norm_forward(x, gain, 1e-5, y, rstd);
  const at::Tensor dgain = operators::rms_norm_backward(dy, x, gain, rstd, dx);
  at::Tensor on_y = like(y), on_rstd = wide_there(rstd).fill_(NAN), on_dx = like(dx), on_dgain;
  ASSERT_TRUE(rms_norm_forward_by_cuda(there(x), wide_there(gain), 1e-5, on_y, on_rstd));
  ASSERT_TRUE(rms_norm_backward_by_cuda(there(dy), there(x), wide_there(gain), on_rstd, on_dx, on_dgain));
  expect(on_y, y, "y");
  expect(on_rstd, rstd, "rstd");
  expect(on_dx, dx, "dx");
  expect(on_dgain, dgain, "dgain");
}

TEST_P(CudaKernels, RotateHeads) {
  at::Tensor x = numbers({3, 20, 7 * cols_}, 1);
  const at::Tensor cos = numbers({20, cols_ / 2}, 2), sin = numbers({20, cols_ / 2}, 3);
  at::Tensor on_x = there(x);
  const RowHeads heads{3, 2 * cols_, cols_};
  for (const double direction : {1., -1.}) {
    operators::rope(x, cos, sin, heads, direction);
    ASSERT_TRUE(rope_by_cuda(on_x, wide_there(cos), wide_there(sin), heads, direction));
    expect(on_x, x, "x");
    x = x.to(type_).to(at::kDouble);
  }
}

TEST_P(CudaKernels, OpenGates) {
  for (const Gate gate : {Gate::kSilu, Gate::kGelu, Gate::kGeluTanh}) {
    const at::Tensor x = numbers({3, 5, 2 * cols_}, 1), dy = numbers({3, 5, cols_}, 2);
    at::Tensor act = at::empty_like(dy), dx = at::empty_like(x);
    operators::glu_forward(x, gate, act);
    operators::glu_backward(x, dy, gate, dx);
    at::Tensor on_act = like(act), on_x = there(x);
    ASSERT_TRUE(glu_forward_by_cuda(on_x, gate, on_act));
    ASSERT_TRUE(glu_backward_by_cuda(on_x, there(dy), gate, on_x));
    expect(on_act, act, "act");
    expect(on_x, dx, "dx");
  }
}

TEST_P(CudaKernels, LossesOfRows) {
  const at::Tensor x = numbers({2, 4, cols_}, 1) * 4;
  const at::Tensor targets = at::arange(8, at::kLong).remainder(cols_);
  targets[3] = -100;
  for (const bool gradient : {false, true}) {
    at::Tensor logits = x.clone(), on_logits = there(x), loss;
    const at::Tensor expected = operators::cross_entropy(logits, targets, -100, 0.25, gradient);
    ASSERT_TRUE(cross_entropy_by_cuda(on_logits, targets.to(gpu_), -100, 0.25, gradient, loss));
    expect_close(loss, expected, type_ == at::kDouble ? 1e-13 : 1e-6, "loss");
    expect(on_logits, logits, "logits");
    const LossFactor factor(at::full({}, 0.25, at::TensorOptions(at::kDouble).device(gpu_)));
    at::Tensor again = there(x);
    ASSERT_TRUE(cross_entropy_by_cuda(again, targets.to(gpu_), -100, factor, gradient, loss));
    EXPECT_TRUE(again.equal(on_logits)) << "the scale is on the GPU";
  }
  at::Tensor loss, logits = there(x);
  ASSERT_TRUE(cross_entropy_by_cuda(logits, targets.to(gpu_).fill_(cols_), -100, 1, true, loss));
  EXPECT_TRUE(std::isnan(loss.item<double>())) << "a target that is no column";
}

TEST_P(CudaKernels, DrawMasks) {
  DropoutMask mask{{7, 8}, 9, 20000, 2, 0, 0, 0};
  const at::Tensor rows = at::arange(3, 40, at::kLong);
  for (const uint32_t length : {0, 5}) {
    mask.length = length;
    mask.first = 2;
    mask.positions = 20;
    const at::Tensor expected = operators::dropout_factors(mask, rows, cols_, at::kDouble);
    at::Tensor factors;
    const auto options = at::TensorOptions(type_).device(gpu_);
    ASSERT_TRUE(dropout_factors_by_cuda(mask, rows.to(gpu_), cols_, options, factors));
    EXPECT_TRUE(factors.cpu().to(at::kDouble).equal(expected));
  }
}

TEST_P(CudaKernels, SumSquares) {
  const at::Tensor x = numbers({1003, cols_}, 1);
  at::Tensor sum;
  ASSERT_TRUE(sum_of_squares_by_cuda(there(x), sum));
  expect_close(sum, x.square().sum(), 1e-13, "sum");
}

INSTANTIATE_TEST_SUITE_P(
    Types, CudaKernels,
    ::testing::Combine(::testing::Values(at::kFloat, at::kDouble, at::kBFloat16, at::kHalf),
                       ::testing::Values<int64_t>(38, 64, 2050)),
    [](const auto& info) { return concat(c10::toString(std::get<0>(info.param)), std::get<1>(info.param)); });

// Whole sequences and slices, of float32 (memory-efficient kernels) and bfloat16 (FlashAttention, but not
// with padding).
TEST(CudaAttention, AttendsAsTheOperatorsDo) {
  if (!at::hasCUDA()) GTEST_SKIP() << "needs a GPU, and a LibTorch for it";
  const at::Device gpu = Device::open("cuda", 0).where();
  PackedAttention causal{/*heads=*/4, /*kv_heads=*/2, /*head_dim=*/16, /*causal=*/true, {}, {}};
  PackedAttention window = causal;
  window.window = 70;
  window.scale = 0.5;
  PackedAttention bidirectional = causal;
  bidirectional.causal = false;
  PackedAttention interleaved = causal;
  interleaved.kv_heads = 4;
  interleaved.interleaved = true;
  PackedAttention slice = causal;
  slice.earlier = {{at::randn({2, 31, slice.packed()}), true, {}}, {at::randn({2, 50, 64}), false, {}}};
  slice.from_later = at::randn({2, 133, 64});
  std::vector<PackedAttention> all = {causal, window, bidirectional, interleaved, slice};
  for (size_t i = 0; i < 5; ++i) {
    PackedAttention padded = all[i];
    padded.shift = at::zeros({2, padded.past() + 133});
    padded.shift[0].narrow(0, 0, 20).fill_(-30000);  // the first queries see nothing else
    padded.shift[1].narrow(0, 90, 30).fill_(-30000);
    all.push_back(padded);
  }
  for (const at::ScalarType narrow : {at::kFloat, at::kBFloat16}) {
    for (const PackedAttention& attention : all) {
      SCOPED_TRACE(concat(c10::toString(narrow), ", window ", attention.window, ", causal ", attention.causal,
                          ", earlier ", attention.earlier.size(), ", padded ", attention.shift.defined()));
      const at::Tensor packed = at::randn({2, 133, attention.packed()}).to(narrow);
      const at::Tensor dout = at::randn({2, 133, 64}).to(narrow);
      if (attention.shift.defined() && attention.causal) dout[0].narrow(0, 0, 20).zero_();
      const auto run = [&](at::Device device, at::ScalarType type) {
        PackedAttention here = attention;
        const at::ScalarType sums = compute_type(type);
        const auto wide = at::TensorOptions(sums).device(device);
        for (EarlierKeys& keys : here.earlier) {
          keys.rows = keys.rows.to(narrow).to(device, type);
          keys.gradient = at::zeros({2, keys.rows.size(1), 64}, wide);
        }
        if (here.from_later.defined()) here.from_later = here.from_later.to(wide);
        if (here.shift.defined()) here.shift = here.shift.to(wide);
        const at::Tensor rows = packed.to(device, type);
        EXPECT_EQ(attention_type(rows, here), type);
        std::vector<at::Tensor> results = {at::empty({2, 133, 64}, rows.options()),
                                           at::empty({2, 4, 133}, wide), at::empty_like(rows)};
        packed_attention_forward(rows, here, results[0], results[1]);
        packed_attention_backward(rows, here, results[0], results[1], dout.to(device, type), results[2]);
        // What sees nothing but padding gives rounding errors, which layers replace by zeros.
        if (attention.shift.defined() && attention.causal && attention.earlier.empty())
          results[0][0].narrow(0, 0, 20).zero_();
        for (const EarlierKeys& keys : here.earlier) results.push_back(keys.gradient);
        return results;
      };
      const auto expected = run(at::kCPU, at::kDouble);
      const auto actual = run(gpu, narrow);
      const auto again = run(gpu, narrow);
      for (size_t i = 0; i < expected.size(); ++i) {
        expect_close(actual[i], expected[i], narrow == at::kFloat ? 1e-5 : 2e-2, concat("result ", i));
        EXPECT_TRUE(actual[i].equal(again[i])) << i;
      }
    }
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
