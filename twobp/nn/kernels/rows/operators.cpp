#include "twobp/nn/kernels/rows/operators.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <string_view>
#include <utility>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/nn/kernels/rows/rows_by_cuda.h"

namespace twobp {
namespace {

std::atomic<int> everywhere = 0;

bool asked_for() {
  const char* asked = std::getenv("TWOBP_KERNELS");
  if (asked == nullptr || *asked == '\0') return false;
  TWOBP_CHECK(std::string_view(asked) == "operators", "TWOBP_KERNELS is \"", asked,
              "\": it can be \"operators\", for LibTorch's in place of our own kernels, or be left out");
  return true;
}

// A view (rows, cols) of the same memory.
at::Tensor as_rows(const at::Tensor& tensor) {
  return tensor.view({-1, tensor.size(-1)});
}

}  // namespace

bool by_operators(const at::Tensor& tensor) {
  static const bool asked = asked_for();
  return (tensor.defined() && !tensor.is_cpu()) || asked || everywhere.load(std::memory_order_relaxed) > 0;
}

std::string kernels_in_use(const std::string& device) {
  if (device != "cpu") return (rows_by_cuda() ? "operators and our kernels on " : "operators on ") + device;
  return by_operators(at::Tensor()) ? "operators" : kernel_instruction_set();
}

OperatorsEverywhere::OperatorsEverywhere() {
  ++everywhere;
}
OperatorsEverywhere::~OperatorsEverywhere() {
  --everywhere;
}

namespace operators {

void rms_norm_forward(const at::Tensor& x, const at::Tensor& gain, double eps, at::Tensor& y, at::Tensor& rstd) {
  if (rms_norm_forward_by_cuda(x, gain, eps, y, rstd)) return;
  const at::Tensor from = wide(as_rows(x));
  rstd.copy_(from.square().mean(1).add_(eps).rsqrt_());
  as_rows(y).copy_((from * rstd.unsqueeze(1)).mul_(gain));
}

at::Tensor rms_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& gain, const at::Tensor& rstd,
                             at::Tensor& dx) {
  if (at::Tensor sums; rms_norm_backward_by_cuda(dy, x, gain, rstd, dx, sums)) return sums;
  const at::Tensor gradient = wide(as_rows(dy));
  const at::Tensor xhat = wide(as_rows(x)) * rstd.unsqueeze(1);
  const at::Tensor dgain = (gradient * xhat).sum(0);
  const at::Tensor g = gradient * gain;
  as_rows(dx).copy_((g - xhat * (g * xhat).mean(1, true)).mul_(rstd.unsqueeze(1)));
  return dgain;
}

void layer_norm_forward(const at::Tensor& x, const at::Tensor& gain, const at::Tensor& bias, double eps, at::Tensor& y,
                        at::Tensor& statistics) {
  if (layer_norm_forward_by_cuda(x, gain, bias, eps, y, statistics)) return;
  const at::Tensor from = wide(as_rows(x));
  const at::Tensor mean = from.mean(1, true);
  const at::Tensor centred = from - mean;
  const at::Tensor rstd = centred.square().mean(1, true).add_(eps).rsqrt_();
  statistics[0].copy_(mean.squeeze(1));
  statistics[1].copy_(rstd.squeeze(1));
  as_rows(y).copy_((centred * rstd).mul_(gain).add_(bias));
}

at::Tensor layer_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& gain,
                               const at::Tensor& statistics, at::Tensor& dx) {
  if (at::Tensor sums; layer_norm_backward_by_cuda(dy, x, gain, statistics, dx, sums)) return sums;
  const at::Tensor gradient = wide(as_rows(dy));
  const at::Tensor rstd = statistics[1].unsqueeze(1);
  const at::Tensor xhat = (wide(as_rows(x)) - statistics[0].unsqueeze(1)).mul_(rstd);
  const at::Tensor sums = at::stack({(gradient * xhat).sum(0), gradient.sum(0)});
  const at::Tensor g = gradient * gain;
  as_rows(dx).copy_((g - g.mean(1, true) - xhat * (g * xhat).mean(1, true)).mul_(rstd));
  return sums;
}

void rope(at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, const RowHeads& heads, double direction) {
  if (rope_by_cuda(x, cos, sin, heads, direction)) return;
  const int64_t half = cos.size(1);
  const at::Tensor rows = x.narrow(2, heads.first, x.size(2) - heads.first);
  const at::Tensor halves =
      rows.as_strided({x.size(0), x.size(1), heads.count, 2, half}, {x.stride(0), x.stride(1), heads.step, half, 1});
  const at::Tensor a = wide(halves.select(3, 0));
  const at::Tensor b = wide(halves.select(3, 1));
  const at::Tensor c = cos.unsqueeze(1);  // (positions, 1, half)
  const at::Tensor s = sin.unsqueeze(1) * direction;
  const at::Tensor rotated = at::stack({a * c - b * s, b * c + a * s}, 3);
  halves.copy_(rotated);
}

const char* approximation(Gate gate) {
  return gate == Gate::kGelu ? "none" : "tanh";
}

// The gate is copied to a matrix of its own. In a part of a wider matrix, the numbers at the ends of rows may be
// rounded differently from the rest.
void glu_forward(const at::Tensor& x, Gate gate, at::Tensor& act) {
  if (glu_forward_by_cuda(x, gate, act)) return;
  const std::vector<at::Tensor> parts = wide(as_rows(x)).chunk(2, 1);
  const at::Tensor g = parts[0].contiguous();
  const at::Tensor open = gate == Gate::kSilu ? at::silu(g) : at::gelu(g, approximation(gate));
  as_rows(act).copy_(open.mul(parts[1]));
}

void glu_backward(const at::Tensor& x, const at::Tensor& dact, Gate gate, at::Tensor& dx) {
  if (glu_backward_by_cuda(x, dact, gate, dx)) return;
  const std::vector<at::Tensor> parts = wide(as_rows(x)).chunk(2, 1);
  const at::Tensor g = parts[0].contiguous();
  const at::Tensor gradient = wide(as_rows(dact));
  const at::Tensor of_gate = gradient * parts[1];
  const bool silu = gate == Gate::kSilu;
  const at::Tensor dg = silu ? at::silu_backward(of_gate, g) : at::gelu_backward(of_gate, g, approximation(gate));
  const at::Tensor du = gradient * (silu ? at::silu(g) : at::gelu(g, approximation(gate)));
  as_rows(dx).copy_(at::cat({dg, du}, 1));
}

void gelu_forward(const at::Tensor& x, at::Tensor& y, GeluForm form) {
  y.copy_(at::gelu(wide(x), form == GeluForm::kTanh ? "tanh" : "none").view(y.sizes()));
}

void gelu_backward(const at::Tensor& x, const at::Tensor& dy, at::Tensor& dx, at::Tensor& act, GeluForm form) {
  const char* approximate = form == GeluForm::kTanh ? "tanh" : "none";
  const at::Tensor from = wide(x);
  const at::Tensor gradient = at::gelu_backward(wide(dy).view(from.sizes()), from, approximate);
  if (act.defined()) act.copy_(at::gelu(from, approximate).view(act.sizes()));
  dx.copy_(gradient.view(dx.sizes()));
}

// As in dropout.h, but in int64, because LibTorch's unsigned integers lack the operators. A device launches some 90 of
// them for any number of columns.
at::Tensor dropout_factors(const DropoutMask& mask, const at::Tensor& which, int64_t cols,
                           const at::TensorOptions& options) {
  if (at::Tensor factors; dropout_factors_by_cuda(mask, which, cols, options, factors)) return factors;
  constexpr int64_t kChunk = 1024;
  constexpr int64_t kLow = 0xffffffff;
  const auto integers = options.dtype(at::kLong);
  // The upper and the lower half of x times a constant, which both have 32 bits. The constant is above 2^31, so that x
  // times (constant - 2^32) does not overflow; it lacks x times 2^32.
  const auto multiply = [&](const at::Tensor& x, int64_t constant) {
    const at::Tensor product = x * (constant - (kLow + 1));
    return std::pair(at::bitwise_right_shift(product, 32).add_(x), product & kLow);
  };
  at::Tensor row = which.view({-1, 1, 1});
  if (mask.length > 0) {
    row = row.div(int64_t{mask.length}, "floor") * int64_t{mask.positions} + int64_t{mask.first} +
          row.remainder(int64_t{mask.length});
  }
  const int64_t rows = which.numel();
  // The random 16 bits of `chunks` times `count` columns from `first` on.
  const auto bits = [&](int64_t first, int64_t chunks, int64_t count) {
    const int64_t groups = (count + 7) / 8;
    at::Tensor a = at::arange(first / 8, first / 8 + chunks * groups, integers).view({1, chunks, groups});
    at::Tensor b = row;
    at::Tensor c = at::full({1, 1, 1}, int64_t{mask.micro_batch}, integers);
    at::Tensor d = at::zeros({1, 1, 1}, integers);
    int64_t key0 = mask.key[0];
    int64_t key1 = mask.key[1];
    for (int round = 0; round < 7; ++round) {
      const auto [a_high, a_low] = multiply(a, 0xD2511F53);
      const auto [c_high, c_low] = multiply(c, 0xCD9E8D57);
      a = c_high.bitwise_xor(b).bitwise_xor(key0);
      b = c_low;
      c = a_high.bitwise_xor(d).bitwise_xor(key1);
      d = a_low;
      key0 = (key0 + 0x9E3779B9) & kLow;
      key1 = (key1 + 0xBB67AE85) & kLow;
    }
    const at::Tensor words = at::cat({a, b, c, d}, 2);
    const int64_t half = std::min(count, 4 * groups);
    return at::cat({(words & 0xffff).narrow(2, 0, half), at::bitwise_right_shift(words, 16).narrow(2, 0, count - half)},
                   2)
        .view({rows, chunks * count});
  };
  std::vector<at::Tensor> parts;
  const int64_t whole = cols / kChunk;
  if (whole > 0) parts.push_back(bits(0, whole, kChunk));
  if (cols % kChunk > 0) parts.push_back(bits(whole * kChunk, 1, cols % kChunk));
  const at::Tensor all = parts.size() == 1 ? parts[0] : at::cat(parts, 1);
  return all.ge(int64_t{mask.threshold}).to(options.dtype()).mul_(mask.scale);
}

at::Tensor sums_of_squares(const at::Tensor& x) {
  if (at::Tensor sums; sums_of_squares_by_cuda(x, sums)) return sums;
  constexpr int64_t kAtOnce = 1 << 22;                    // numbers that are copied to float64 at the same time
  const at::Tensor all = x.as_strided({x.numel()}, {1});  // in memory order
  std::vector<at::Tensor> sums;
  for (const at::Tensor& part : all.split(kAtOnce)) {
    const int64_t whole = part.numel() / kSquareBlock * kSquareBlock;
    const at::Tensor squares = part.to(at::kDouble).square_();
    if (whole > 0) sums.push_back(squares.narrow(0, 0, whole).view({-1, kSquareBlock}).sum(1));
    if (whole < part.numel()) sums.push_back(squares.narrow(0, whole, part.numel() - whole).sum().view({1}));
  }
  return at::cat(sums);
}

at::Tensor cross_entropy(at::Tensor& logits, const at::Tensor& targets, int64_t ignore, const LossFactor& scale,
                         bool gradient) {
  if (at::Tensor loss; cross_entropy_by_cuda(logits, targets, ignore, scale, gradient, loss)) return loss;
  at::Tensor rows = as_rows(logits);
  const at::Tensor ignored = targets.eq(ignore);
  const at::Tensor target = targets.masked_fill(ignored, 0).unsqueeze(1);
  const at::Tensor log_p = at::log_softmax(wide(rows), 1);
  const at::Tensor losses = log_p.gather(1, target).squeeze(1).neg().to(at::kDouble).masked_fill(ignored, 0);
  if (gradient) {
    at::Tensor g = log_p.exp();
    g.scatter_add_(1, target, at::full_like(target, -1, g.options()));
    rows.copy_((g *= scale).masked_fill_(ignored.unsqueeze(1), 0));
  }
  return losses.sum();
}

at::Tensor soft_cap(at::Tensor& x, double cap) {
  const at::Tensor t = wide(x).div(cap).tanh_();
  x.copy_(t * cap);
  return 1 - t.square();
}

void add_rows_at(at::Tensor& rows, const at::Tensor& ids, const at::Tensor& from) {
  // Both add in the order of `ids`, into `rows` itself. On a GPU, only the second does, and on CPUs the first.
  if (rows.is_cpu()) {
    rows.index_add_(0, ids, wide(from));
  } else {
    rows.index_put_({ids}, wide(from), /*accumulate=*/true);
  }
}

}  // namespace operators

}  // namespace twobp
