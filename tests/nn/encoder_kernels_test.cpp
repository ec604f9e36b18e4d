// BERT's kernels of every instruction set this CPU has: masks the same to the bit, the rest against float64.
#include "twobp/nn/kernels/encoder_kernels.h"

#include <cmath>
#include <numeric>

#include "tests/nn/kernel_test_util.h"
#include "tests/nn/layer_test_util.h"

namespace twobp {
namespace {

using namespace test;

std::vector<std::pair<std::string, const EncoderKernels<float>*>> tables() {
  std::vector<std::pair<std::string, const EncoderKernels<float>*>> all;
  for (const auto& set : kernel_sets(encoder_kernels_tables())) all.emplace_back(set.name, set.of_float);
  return all;
}

constexpr int64_t kRows = 3;

float* data(const at::Tensor& t) {
  return t.mutable_data_ptr<float>();
}

// Relative to the largest, or to 1.
void expect_near(const at::Tensor& actual, const at::Tensor& expected, double roundings,
                 const std::string& what) {
  expect_within(actual, expected, roundings * 0x1p-24 * std::max(1.0, largest(expected)), what);
}

TEST(EncoderKernels, MasksAreTheSameToTheBit) {
  DropoutMask mask;
  mask.key[0] = 123;
  mask.key[1] = 456;
  mask.micro_batch = 7;
  mask.threshold = 20000;
  mask.scale = 1.5;
  for (const int64_t cols : {1, 7, 8, 33, 1024, 2051}) {
    std::vector<at::Tensor> results;
    for (const auto& [name, kernels] : tables()) {
      results.push_back(at::ones({kRows, cols}));
      kernels->dropout(data(results.back()), nullptr, data(results.back()), kRows, cols, mask, 5);
      EXPECT_TRUE(same_bits(results.back(), results.front())) << name << " " << cols;
      // A part of the rows alone gives what it gives among all.
      at::Tensor last = at::ones({1, cols});
      kernels->dropout(data(last), nullptr, data(last), 1, cols, mask, 5 + kRows - 1);
      EXPECT_TRUE(same_bits(last[0], results.back()[kRows - 1])) << name << " " << cols;
    }
  }
}

TEST(EncoderKernels, GeluOverItsWholeRange) {
  const at::Tensor x = at::linspace(-14, 14, 20001, at::kFloat);
  const at::Tensor wide = x.to(at::kDouble);
  const at::Tensor gate = 0.5 * at::erfc(-wide / std::sqrt(2.0));
  const at::Tensor bell = at::exp(-0.5 * wide.square()) / std::sqrt(2 * M_PI);
  for (const auto& [name, kernels] : tables()) {
    at::Tensor y = at::empty_like(x), dx = at::empty_like(x), act = at::empty_like(x);
    const at::Tensor ones = at::ones_like(x);
    kernels->gelu_forward(data(x), data(y), x.numel(), GeluForm::kErf);
    kernels->gelu_backward(data(x), data(ones), data(dx), data(act), x.numel(), GeluForm::kErf);
    // Where x < 0 the small results are right to their own size: exp of -x^2 / 2 rounds that to x^2 / 2
    // units.
    const at::Tensor bound = (wide * gate).abs() * (16 + wide.square()) * 0x1p-24 + 1e-37;
    EXPECT_TRUE(((y.to(at::kDouble) - wide * gate).abs() <= bound).all().item<bool>()) << name;
    EXPECT_TRUE(((act.to(at::kDouble) - wide * gate).abs() <= bound).all().item<bool>()) << name;
    expect_near(dx, gate + wide * bell, 16, name + " dx");
    kernels->gelu_forward(data(x), data(y), x.numel(), GeluForm::kTanh);
    const at::Tensor inner = std::sqrt(2 / M_PI) * (wide + 0.044715 * wide.pow(3));
    expect_near(y, 0.5 * wide * (1 + at::tanh(inner)), 16, name + " tanh");
  }
}

TEST(EncoderKernels, SoftmaxWithShift) {
  for (const int64_t cols : {1, 5, 32, 33, 300}) {
    const at::Tensor scores = random({kRows, cols}, 1, at::kFloat) * 8;
    at::Tensor shift = at::zeros({cols});
    if (cols > 4) shift[3] = -30000;
    const at::Tensor logits = scores.to(at::kDouble) * 0.25 + shift;
    for (const auto& [name, kernels] : tables()) {
      at::Tensor p = scores.clone(), log_sum = at::empty({kRows});
      kernels->softmax_forward(data(p), data(shift), data(log_sum), kRows, cols, 0.25, {}, 0);
      expect_near(p, at::softmax(logits, -1), static_cast<double>(cols) + 60, name);
      expect_near(log_sum, at::logsumexp(logits, -1), static_cast<double>(cols) + 60, name);
      if (cols <= 4) continue;
      EXPECT_EQ(largest(p.select(1, 3)), 0) << name;
    }
  }
}

TEST(EncoderKernels, LayerNormAndRows) {
  for (const int64_t cols : {5, 33, 1030}) {
    const at::Tensor x = random({kRows, cols}, 1, at::kFloat) + 3;
    const at::Tensor gain = random({cols}, 2, at::kFloat), bias = random({cols}, 3, at::kFloat);
    const at::Tensor wide = x.to(at::kDouble);
    const at::Tensor off = wide - wide.mean(-1, true);
    const at::Tensor expected = off / at::sqrt(off.square().mean(-1, true) + 1e-3) * gain + bias;
    for (const auto& [name, kernels] : tables()) {
      at::Tensor y = at::empty_like(x), mean = at::empty({kRows}), rstd = at::empty({kRows});
      kernels->layer_norm_forward(data(x), data(gain), data(bias), data(y), data(mean), data(rstd), kRows,
                                  cols, 1e-3);
      expect_near(y, expected, static_cast<double>(2 * cols) + 40, name);
      at::Tensor sums = bias.clone();
      kernels->add_rows(data(x), data(sums), kRows, cols);
      expect_near(sums, bias.to(at::kDouble) + wide.sum(0), 2 * kRows, name);
      at::Tensor added = x.clone();
      kernels->add_row(data(added), data(bias), kRows, cols);
      EXPECT_TRUE(same_bits(added, x + bias)) << name;
    }
  }
}

}  // namespace
}  // namespace twobp
