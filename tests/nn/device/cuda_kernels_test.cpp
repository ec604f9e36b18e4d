// On a GPU, our kernels of rows and ATen's fused attention against the operators in float64 on a CPU.
#include <thread>

#include <gtest/gtest.h>

#include "tests/nn/device/attention_cases.h"
#include "tests/nn/typed_options.h"
#include "twobp/nn/device/device.h"
#include "twobp/nn/kernels/attention/packed_attention.h"
#include "twobp/nn/kernels/rows/operators.h"
#include "twobp/nn/kernels/rows/rows_by_cuda.h"

namespace twobp::TWOBP_FILE {
namespace {

// The largest relative error of a norm, by dtype.
double tolerance(at::ScalarType type) {
  return type == at::kDouble ? 1e-13 : type == at::kFloat ? 1e-6 : type == at::kHalf ? 1e-3 : 8e-3;
}

void expect_close(const at::Tensor& actual, const at::Tensor& expected, double most, const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  const at::Tensor error = actual.cpu().to(at::kDouble) - expected.to(at::kDouble);
  const double relative = (error.norm() / expected.to(at::kDouble).norm()).item<double>();
  EXPECT_LE(relative, most) << what;  // NaN is not
}

class CudaKernels : public ::testing::TestWithParam<std::tuple<at::ScalarType, int64_t>> {
 protected:
  void SetUp() override {
    if (!at::hasCUDA() || !rows_by_cuda()) GTEST_SKIP() << "needs a GPU, and a build with nvcc and a LibTorch for CUDA";
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

TEST_P(CudaKernels, NormAndCentreRows) {
  const at::Tensor x = numbers({3, 45, cols_}, 1) + 2, dy = numbers({3, 45, cols_}, 2);
  const at::Tensor gain = numbers({cols_}, 3), bias = numbers({cols_}, 4);
  at::Tensor y = at::empty_like(x), statistics = at::empty({2, 135}, at::kDouble), dx = at::empty_like(x);
  const at::Tensor from = x.to(type_).to(at::kDouble);
  operators::layer_norm_forward(from, gain, bias, 1e-5, y, statistics);
  const at::Tensor sums = operators::layer_norm_backward(dy, from, gain, statistics, dx);
  at::Tensor on_y = like(y), on_statistics = wide_there(statistics).fill_(NAN), on_sums;
  ASSERT_TRUE(layer_norm_forward_by_cuda(there(x), wide_there(gain), wide_there(bias), 1e-5, on_y, on_statistics));
  expect(on_y, y, "y");
  expect(on_statistics[0], statistics[0], "mean");
  expect(on_statistics[1], statistics[1], "rstd");
  at::Tensor on_dx[] = {like(dx), there(dy), there(x)};  // elsewhere, in dy, in x
  for (int i = 0; i < 3; ++i) {
    const at::Tensor on_dy = i == 1 ? on_dx[i] : there(dy), on_x = i == 2 ? on_dx[i] : there(x);
    ASSERT_TRUE(layer_norm_backward_by_cuda(on_dy, on_x, wide_there(gain), on_statistics, on_dx[i], on_sums));
    expect(on_dx[i], dx, "dx");
    expect(on_sums[0], sums[0], "dgain");
    expect(on_sums[1], sums[1], "dbias");
  }
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
  if (cols_ >= 16) {  // all numbers that a thread loads first are masked
    at::Tensor masked = x.clone(), loss;
    masked[1][3].narrow(0, 8, 8).fill_(-INFINITY);
    at::Tensor on_masked = there(masked);
    const at::Tensor expected = operators::cross_entropy(masked, targets, -100, 1, true);
    ASSERT_TRUE(cross_entropy_by_cuda(on_masked, targets.to(gpu_), -100, 1, true, loss));
    expect_close(loss, expected, type_ == at::kDouble ? 1e-13 : 1e-6, "loss");
    expect(on_masked, masked, "logits");
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
  at::Tensor sums, of_part;
  ASSERT_TRUE(sums_of_squares_by_cuda(there(x), sums));
  expect_close(sums.sum(), x.square().sum(), 1e-13, "sum");
  const at::Tensor part = there(x).view({-1}).narrow(0, 2 * kSquareBlock, kSquareBlock + 7);
  ASSERT_TRUE(sums_of_squares_by_cuda(part, of_part));
  EXPECT_TRUE(of_part[0].equal(sums[2])) << "the bits depend on where a tensor begins";
}

INSTANTIATE_TEST_SUITE_P(Types, CudaKernels,
                         ::testing::Combine(::testing::Values(at::kFloat, at::kDouble, at::kBFloat16, at::kHalf),
                                            ::testing::Values<int64_t>(38, 64, 2050)),
                         [](const auto& info) {
                           return concat(c10::toString(std::get<0>(info.param)), std::get<1>(info.param));
                         });

// Whole sequences and slices, of float32 (memory-efficient kernels) and bfloat16 (FlashAttention, but not with
// padding).
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
        std::vector<at::Tensor> results = {at::empty({2, 133, 64}, rows.options()), at::empty({2, 4, 133}, wide),
                                           at::empty_like(rows)};
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

using Cases = test::AttentionCases<4>;  // several blocks of a kernel

// What a GPU computes by fused kernels: documents, windows, slices, padding.
TEST(CudaAttention, AttendsInDocumentsAsTheOperatorsDo) {
  if (!at::hasCUDA()) GTEST_SKIP() << "needs a GPU, and a LibTorch for it";
  const at::Device gpu = Device::open("cuda", 0).where();
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const auto& [name, attention] : Cases::packed()) {
      SCOPED_TRACE(concat(c10::toString(type), ", ", name));
      const at::Tensor packed = test::numbers({Cases::kBatch, Cases::kPositions, attention.packed()}, 1, type);
      const at::Tensor dout = Cases::gradient_of(attention, type);
      const auto there = at::TensorOptions(type).device(gpu);
      const bool fused = Cases::by(attention, type) != Cases::By::kOperators;
      ASSERT_EQ(takes_fused_attention(packed.to(there), attention), fused);
      if (!fused) continue;
      const auto actual = Cases::run(attention, packed, dout, there, /*fused=*/true);
      const auto again = Cases::run(attention, packed, dout, there, /*fused=*/true);
      Cases::expect_same(attention, actual, Cases::run(attention, packed, dout, at::kDouble, /*fused=*/false), type);
      for (size_t i = 0; i < actual.size(); ++i) EXPECT_TRUE(actual[i].equal(again[i])) << i;
    }
  }
}

// A result is linear in the values, so that dL/dv of L = <dout, out> gives <dL/dv, v> = <dout, out>, if backward has
// the mask of forward.
TEST(CudaAttention, DropsByItsKeyAlone) {
  if (!at::hasCUDA()) GTEST_SKIP() << "needs a GPU, and a LibTorch for it";
  const at::Device gpu = Device::open("cuda", 0).where();
  at::Generator generator = at::globalContext().defaultGenerator(gpu);
  at::rand({5}, at::TensorOptions(at::kFloat).device(gpu));
  const at::Tensor state = generator.get_state();
  const auto mask_of = [](uint32_t key, uint32_t micro_batch) {
    return DropoutMask{{key, 9}, micro_batch, /*threshold=*/16384, 4. / 3, 0, 0, 0};  // 1/4, also of 8 bits
  };
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (auto [name, attention] : Cases::packed()) {
      if (Cases::by(attention, type) == Cases::By::kOperators || !attention.earlier.empty()) continue;
      SCOPED_TRACE(concat(c10::toString(type), ", ", name));
      if (attention.shift.defined()) attention.shift[0].zero_();  // no query sees padding alone
      const auto there = at::TensorOptions(type).device(gpu);
      at::Tensor packed = test::numbers({Cases::kBatch, Cases::kPositions, attention.packed()}, 1, type).to(there);
      const auto run = [&](const DropoutMask& mask, const at::Tensor& dout) {
        PackedAttention here = attention;
        here.dropout = mask;
        EXPECT_TRUE(takes_fused_attention(packed, here));
        return Cases::run(here, packed, dout, there, /*fused=*/true);
      };
      const at::Tensor zero = at::zeros({Cases::kBatch, Cases::kPositions, Cases::kWidth}, there);
      const at::Tensor dout = run(mask_of(1, 2), zero)[0];  // so <dout, out> is large
      const auto results = run(mask_of(1, 2), dout);
      const auto again = run(mask_of(1, 2), dout);
      for (size_t i = 0; i < results.size(); ++i) EXPECT_TRUE(results[i].equal(again[i])) << i;
      EXPECT_FALSE(run(mask_of(2, 2), dout)[0].equal(results[0])) << "another key";
      EXPECT_FALSE(run(mask_of(1, 3), dout)[0].equal(results[0])) << "another micro-batch";
      const auto inner = [](const at::Tensor& a, const at::Tensor& b) {
        return (a.to(at::kDouble) * b.to(at::kDouble)).sum().item<double>();
      };
      const double expected = inner(dout, results[0]);
      const PackedHeads values(packed, attention), gradients(results[2], attention);
      EXPECT_NEAR(inner(values.v, gradients.v), expected, (type == at::kFloat ? 1e-4 : 2e-2) * expected);
      if (name != "causal" && name != "documents" && name != "bidirectional, padded") continue;
      // The mean over many keys is what is without dropout.
      at::Tensor sum = at::zeros(zero.sizes(), zero.options().dtype(at::kDouble));
      constexpr int kKeys = 100;
      for (uint32_t key = 0; key < kKeys; ++key) sum += run(mask_of(key, 0), zero)[0].to(at::kDouble);
      const at::Tensor whole = run({}, zero)[0].to(at::kDouble);
      EXPECT_LT((sum / kKeys - whole).norm().item<double>(), 0.1 * whole.norm().item<double>());
    }
  }
  EXPECT_TRUE(generator.get_state().equal(state)) << "others draw from the generator too";
}

TEST(CudaAttention, RanksOfAGpuDrawInTurn) {
  if (!at::hasCUDA()) GTEST_SKIP() << "needs a GPU, and a LibTorch for it";
  const at::Device gpu = Device::open("cuda", 0).where();
  const auto there = at::TensorOptions(at::kBFloat16).device(gpu);
  const at::Tensor packed =
      test::numbers({Cases::kBatch, Cases::kPositions, Cases::causal().packed()}, 1, at::kBFloat16).to(there);
  const at::Tensor dout = test::numbers({Cases::kBatch, Cases::kPositions, Cases::kWidth}, 2, at::kBFloat16).to(there);
  const auto run = [&](uint32_t key) {
    PackedAttention attention = Cases::causal();
    attention.dropout = {{key, 9}, 0, 16384, 4. / 3, 0, 0, 0};
    const auto type = key % 2 == 0 ? at::kBFloat16 : at::kFloat;  // both kernels draw
    return Cases::run(attention, packed, dout, there.dtype(type), /*fused=*/true)[2].cpu();
  };
  constexpr uint32_t kRanks = 4, kCalls = 20;
  std::vector<std::vector<at::Tensor>> results(kRanks);
  std::vector<std::thread> ranks;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      const Device mine = Device::open("cuda", 0);
      const OnStream here(mine.compute());
      for (uint32_t i = 0; i < kCalls; ++i) results[rank].push_back(run(rank * kCalls + i));
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    for (uint32_t i = 0; i < kCalls; ++i)
      EXPECT_TRUE(results[rank][i].equal(run(rank * kCalls + i))) << rank << " " << i;
  }
}

// Of captured models: any mask, and other numbers of keys than of queries.
TEST(CudaAttention, AttendsApartAsTheOperatorsDo) {
  if (!at::hasCUDA()) GTEST_SKIP() << "needs a GPU, and a LibTorch for it";
  const at::Device gpu = Device::open("cuda", 0).where();
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const Cases::ApartCase& one : Cases::apart(type)) {
      for (const int64_t kv_heads : {Cases::kHeads, int64_t{2}}) {
        SCOPED_TRACE(concat(c10::toString(type), ", ", one.name, ", ", kv_heads, " key-value heads"));
        const auto there = at::TensorOptions(type).device(gpu);
        const auto actual = Cases::run_apart(one, kv_heads, type, there);
        const auto again = Cases::run_apart(one, kv_heads, type, there);
        Cases::expect_same_apart(actual, Cases::run_apart(one, kv_heads, type, at::kDouble), type);
        for (size_t i = 0; i < actual.size(); ++i) EXPECT_TRUE(actual[i].equal(again[i])) << i;
      }
    }
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
