#include "twobp/graph/own_operators.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <vector>

#include <ATen/ATen.h>

#include "twobp/core/check.h"
#include "twobp/nn/kernels/image/image_kernels.h"
#include "twobp/nn/kernels/products/products.h"
#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/kernels/rows/dropout.h"
#include "twobp/nn/kernels/rows/operators.h"
#include "twobp/nn/kernels/rows/row_operations.h"
#include "twobp/nn/values.h"

namespace twobp::graph {
namespace {

// Each element of the mask is true with probability 1 - p, in steps of 2^-16. The mask depends on the shape and on
// `random` alone. That of a slice is its part of the whole sequences' mask: rows are their positions.
void dropout(Stack& stack, const SliceCall* slice) {
  Arguments arguments(stack, 3);
  const at::Tensor x = arguments.tensor(0).contiguous();
  const double p = arguments.number(1);
  const auto key = static_cast<uint64_t>(arguments.integer(2));
  TWOBP_CHECK(p >= 0 && p <= 1, "twobp::dropout has probability ", p, ", which must be in [0, 1]");
  DropoutMask words;
  words.key[0] = static_cast<uint32_t>(key);
  words.key[1] = static_cast<uint32_t>(key >> 32);
  words.threshold = static_cast<uint32_t>(std::lround(p * 65536));
  if (slice != nullptr) {
    words.length = static_cast<uint32_t>(slice->length);
    words.first = static_cast<uint32_t>(slice->begin);
    words.positions = static_cast<uint32_t>(slice->positions);
  }
  const double scale = p < 1 ? 1 / (1 - p) : 0;
  const int64_t cols = x.dim() == 0 ? 1 : x.size(-1);
  const int64_t rows = cols == 0 ? 0 : x.numel() / cols;
  at::Tensor mask = at::empty(x.sizes(), x.options().dtype(at::kBool));
  at::Tensor y = at::empty(x.sizes(), x.options());
  const auto fill = [&](auto zero) {
    using T = decltype(zero);
    const T* from = x.const_data_ptr<T>();
    T* to = y.mutable_data_ptr<T>();
    bool* keep = mask.mutable_data_ptr<bool>();
    for (int64_t row = 0; row < rows; ++row) {
      for_each_kept<float>(words, static_cast<uint32_t>(row), cols, cols, [&](int64_t c, float factor) {
        const int64_t at = row * cols + c;
        keep[at] = factor != 0;
        to[at] = from[at] * T(factor) * T(scale);
      });
    }
  };
  if (x.is_cpu() && x.scalar_type() == at::kFloat) {
    fill(0.0F);
  } else if (x.is_cpu() && x.scalar_type() == at::kDouble) {
    fill(0.0);
  } else {
    const auto options = x.options().dtype(at::kFloat);
    const at::Tensor which = at::arange(rows, options.dtype(at::kLong));
    mask.copy_(operators::dropout_factors(words, which, cols, options).view(x.sizes()));
    y = x.mul(mask).mul_(scale);
  }
  arguments.give(std::move(y), std::move(mask));
}

void run_dropout(Stack& stack) {
  dropout(stack, nullptr);
}

void run_dropout_of_slice(Stack& stack, const SliceCall& slice) {
  dropout(stack, &slice);
}

void check_rms_norm(const at::Tensor& x, const at::Tensor& gain) {
  const bool fits = x.dim() > 0 && x.size(-1) > 0 && gain.dim() == 1 && gain.size(0) == x.size(-1) &&
                    gain.scalar_type() == x.scalar_type() && is_wide(x);
  TWOBP_CHECK(fits, "twobp::rms_norm takes (..., n) and a gain (n), both float32 or float64, not ", x.sizes(), " ",
              c10::toString(x.scalar_type()), " and ", gain.sizes(), " ", c10::toString(gain.scalar_type()));
}

void run_rms_norm(Stack& stack) {
  Arguments arguments(stack, 3);
  const at::Tensor x = arguments.tensor(0).contiguous();
  const at::Tensor gain = arguments.tensor(1).contiguous();
  check_rms_norm(x, gain);
  auto [y, rstd] = rms_norm(x, gain, arguments.number(2));
  arguments.give(std::move(y), std::move(rstd));
}

void run_rms_norm_backward(Stack& stack) {
  Arguments arguments(stack, 4);
  at::Tensor dy = arguments.tensor(0);
  const at::Tensor x = arguments.tensor(1).contiguous();
  const at::Tensor gain = arguments.tensor(2).contiguous();
  const at::Tensor rstd = arguments.tensor(3);
  check_rms_norm(x, gain);
  TWOBP_CHECK(dy.sizes() == x.sizes() && dy.scalar_type() == x.scalar_type() && rstd.is_contiguous() &&
                  rstd.numel() == x.numel() / x.size(-1) && rstd.scalar_type() == x.scalar_type(),
              "twobp::rms_norm_backward takes a gradient of x's shape, and x's rstd");
  dy = as_contiguous(std::move(dy));
  at::Tensor dx = exclusively_owned(dy) ? dy : at::empty(x.sizes(), x.options());
  at::Tensor dgain = rms_norm_backward(dy, x, gain, rstd, dx);
  arguments.give(std::move(dx), std::move(dgain));
}

void check_glu(const at::Tensor& x) {
  TWOBP_CHECK(x.dim() > 0 && x.size(-1) > 0 && x.size(-1) % 2 == 0 && x.is_floating_point(),
              "twobp::glu takes numbers (..., 2 n), not ", x.sizes(), " ", c10::toString(x.scalar_type()));
}

void run_glu(Stack& stack) {
  Arguments arguments(stack, 2);
  const at::Tensor x = with_even_rows(arguments.tensor(0));
  const Gate gate = parse_gate(arguments.text(1));
  check_glu(x);
  arguments.give(glu(x, gate));
}

void run_glu_backward(Stack& stack) {
  Arguments arguments(stack, 3);
  const at::Tensor dy = as_contiguous(arguments.tensor(0));
  at::Tensor x = with_even_rows(arguments.tensor(1));
  const Gate gate = parse_gate(arguments.text(2));
  check_glu(x);
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() /= 2;
  TWOBP_CHECK(dy.sizes() == sizes && dy.scalar_type() == x.scalar_type(),
              "twobp::glu_backward takes a gradient (..., n) for x (..., 2 n), not ", dy.sizes(), " for ", x.sizes());
  at::Tensor dx = exclusively_owned(x) ? x : at::empty(x.sizes(), x.options());
  glu_backward(x, dy, gate, dx);
  arguments.give(std::move(dx));
}

// In place, if nobody else holds x and each position's heads lie side by side.
void run_rotary(Stack& stack) {
  Arguments arguments(stack, 4);
  at::Tensor x = arguments.tensor(0);
  const at::Tensor cos = arguments.tensor(1).contiguous();
  const at::Tensor sin = arguments.tensor(2).contiguous();
  TWOBP_CHECK(x.dim() == 4 && is_wide(x) && x.size(3) > 0 && x.size(3) % 2 == 0,
              "twobp::rotary takes (batch, heads, positions, 2 n) in float32 or float64, not ", x.sizes(), " ",
              c10::toString(x.scalar_type()));
  check_tables(cos, sin, x.size(2), x.size(3), x.scalar_type());
  const int64_t heads = x.size(1);
  const bool owned = exclusively_owned(x);
  x = x.transpose(1, 2);
  at::Tensor rows = owned && x.is_contiguous() ? x : x.clone(at::MemoryFormat::Contiguous);
  at::Tensor packed = rows.flatten(2);
  rope(packed, cos, sin, {heads, x.size(3)}, arguments.flag(3));
  arguments.give(rows.transpose(1, 2));
}

// The logits become their gradient, so there is no second tensor of their size.
void run_cross_entropy(Stack& stack) {
  Arguments arguments(stack, 3);
  at::Tensor logits = arguments.tensor(0);
  const at::Tensor labels = as_contiguous(arguments.tensor(1));
  TWOBP_CHECK(logits.dim() == 2 && is_wide(logits) && logits.size(1) > 0 && labels.dim() == 1 &&
                  labels.size(0) == logits.size(0) && labels.scalar_type() == at::kLong,
              "twobp::cross_entropy takes logits (n, classes) in float32 or float64 and labels (n) in int64, not ",
              logits.sizes(), " ", c10::toString(logits.scalar_type()), " and ", labels.sizes(), " ",
              c10::toString(labels.scalar_type()));
  logits = own_even_rows(std::move(logits));
  at::Tensor sum =
      cross_entropy(logits, labels, arguments.integer(2), /*scale=*/1, /*gradient=*/true).to(logits.options());
  arguments.give(std::move(sum), std::move(logits));
}

bool is_plain_product(const at::Tensor& a, const at::Tensor& b) {
  return a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0) && a.scalar_type() == b.scalar_type() && is_wide(a) &&
         !by_operators(a) && !by_operators(b);
}

void run_mm(Stack& stack) {
  Arguments arguments(stack, 2);
  const at::Tensor a = arguments.tensor(0);
  const at::Tensor b = arguments.tensor(1);
  if (!is_plain_product(a, b)) return arguments.give(at::mm(a, b));
  at::Tensor y = at::empty({a.size(0), b.size(1)}, a.options());
  multiply_into(y, a, b);
  arguments.give(std::move(y));
}

void run_addmm(Stack& stack) {
  Arguments arguments(stack, 5);
  const at::Tensor row = arguments.tensor(0);
  const at::Tensor a = arguments.tensor(1);
  const at::Tensor b = arguments.tensor(2);
  const at::Scalar beta = arguments.scalar(3);
  const at::Scalar alpha = arguments.scalar(4);
  const bool plain = is_plain_product(a, b) && row.dim() == 1 && row.size(0) == b.size(1) && row.is_contiguous() &&
                     row.scalar_type() == a.scalar_type() && beta.equal(1) && alpha.equal(1);
  if (!plain) return arguments.give(at::addmm(row, a, b, beta, alpha));
  at::Tensor y = at::empty({a.size(0), b.size(1)}, a.options());
  multiply_and_add(y, a, b, row);
  arguments.give(std::move(y));
}

// ATen's kernels of GroupNorm, and of BatchNorm's gradients, trust that x and dy are laid out in the same way, and that
// the others are contiguous. Autograd sees to that, but here a convolution may lay out its result in another way than
// it did at capture.
template <size_t arguments, size_t x, size_t dy>
void run_norm(Stack& stack, const char* name) {
  const size_t first = stack.size() - arguments;
  const at::MemoryFormat format = stack[first + x].toTensor().suggest_memory_format();
  for (size_t i = 0; i < arguments; ++i) {
    c10::IValue& value = stack[first + i];
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    value = value.toTensor().contiguous(i == x || i == dy ? format : at::MemoryFormat::Contiguous);
  }
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(stack);
}

void run_group_norm_forward(Stack& stack) {
  run_norm<8, 0, 0>(stack, "aten::native_group_norm");
}

void run_group_norm_backward(Stack& stack) {
  run_norm<10, 1, 0>(stack, "aten::native_group_norm_backward");
}

void run_batch_norm_backward(Stack& stack) {
  run_norm<10, 1, 0>(stack, "aten::native_batch_norm_backward");
}

// oneDNN leaves the gradients of taps that meet only the padding uninitialised, in layouts that depend on the
// processor. They are 0. A clone, because in the layout channels last others are wrong, too.
void run_convolution_backward(Stack& stack) {
  constexpr size_t kArguments = 11;
  constexpr int64_t kMost = 1 << 20;  // ATen refuses what is wrong, and no image needs more
  const size_t first = stack.size() - kArguments;
  const at::Tensor dy = stack[first].toTensor(), x = stack[first + 1].toTensor();
  const at::Tensor weight = stack[first + 2].toTensor();
  const at::Tensor& image = stack[first + 7].toBool() ? dy : x;  // the wide side of a transposed convolution
  std::vector<std::pair<int64_t, int64_t>> idle;                 // dimensions of the weight and their taps
  for (int64_t dim = 2; x.is_cpu() && dim < std::min(image.dim(), weight.dim()); ++dim) {
    const auto of = [&](size_t argument) {
      const std::vector<int64_t> values = stack[first + argument].toIntVector();
      return values.size() == 1 ? values[0] : values.at(static_cast<size_t>(dim - 2));
    };
    const int64_t stride = of(4), padding = of(5), dilation = of(6);
    if (stride < 1 || std::max({stride, padding, dilation}) > kMost) continue;
    for (int64_t tap = 0; tap < weight.size(dim); ++tap) {
      if (!tap_meets(image.size(dim), weight.size(dim), stride, padding, dilation, tap)) idle.emplace_back(dim, tap);
    }
  }
  if (!idle.empty()) {
    for (size_t i = first; i < first + 3; ++i) stack[i] = stack[i].toTensor().clone(at::MemoryFormat::Contiguous);
  }
  c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "").callBoxed(stack);
  const at::Tensor gradient = stack[first + 1].toTensor();
  if (!gradient.defined()) return;
  for (const auto& [dim, tap] : idle) gradient.select(dim, tap).zero_();
}

constexpr OwnOperator kReplaced[] = {{"aten::mm", &run_mm},
                                     {"aten::convolution_backward", &run_convolution_backward},
                                     {"aten::addmm", &run_addmm},
                                     {"aten::native_group_norm", &run_group_norm_forward},
                                     {"aten::native_group_norm_backward", &run_group_norm_backward},
                                     {"aten::native_batch_norm_backward", &run_batch_norm_backward}};

constexpr OwnOperator kOwn[] = {
    {"twobp::dropout(Tensor x, float p, int random) -> (Tensor y, Tensor mask)", &run_dropout, &run_dropout_of_slice},
    {"twobp::rms_norm(Tensor x, Tensor gain, float eps) -> (Tensor y, Tensor rstd)", &run_rms_norm},
    {"twobp::rms_norm_backward(Tensor dy, Tensor x, Tensor gain, Tensor rstd) -> (Tensor dx, Tensor dgain)",
     &run_rms_norm_backward},
    {"twobp::glu(Tensor x, str activation) -> Tensor y", &run_glu},
    {"twobp::glu_backward(Tensor dy, Tensor x, str activation) -> Tensor dx", &run_glu_backward},
    {"twobp::rotary(Tensor x, Tensor cos, Tensor sin, bool back) -> Tensor y", &run_rotary},
    {"twobp::cross_entropy(Tensor logits, Tensor labels, int ignore) -> (Tensor sum, Tensor gradient)",
     &run_cross_entropy}};

// Those of this file, and others.
std::vector<OwnOperator> together(std::span<const OwnOperator> here,
                                  std::initializer_list<std::span<const OwnOperator>> others) {
  std::vector<OwnOperator> all(here.begin(), here.end());
  for (const auto& more : others) all.insert(all.end(), more.begin(), more.end());
  return all;
}

}  // namespace

void make_contiguous(Stack& stack, size_t arguments) {
  for (size_t i = stack.size() - arguments; i < stack.size(); ++i) {
    if (stack[i].isTensor() && stack[i].toTensor().defined()) stack[i] = stack[i].toTensor().contiguous();
  }
}

void check_tables(const at::Tensor& cos, const at::Tensor& sin, int64_t positions, int64_t head_dim,
                  at::ScalarType dtype) {
  for (const at::Tensor& table : {cos, sin}) {
    TWOBP_CHECK(head_dim % 2 == 0 && table.dim() == 2 && table.size(0) == positions && table.size(1) == head_dim / 2 &&
                    table.scalar_type() == dtype,
                "rotary embedding of ", positions, " positions and ", head_dim, " numbers takes cos and sin ",
                "(positions, half as many numbers) of the same dtype, not ", table.sizes(), " ",
                c10::toString(table.scalar_type()));
  }
}

std::span<const OwnOperator> own_operators() {
  static const std::vector<OwnOperator> all =
      together(kOwn, {attention_operators(), four_bit_operators(), group_operators()});
  return all;
}

std::span<const OwnOperator> replaced_operators() {
  static const std::vector<OwnOperator> all = together(kReplaced, {replaced_attention_operators()});
  return all;
}

}  // namespace twobp::graph
