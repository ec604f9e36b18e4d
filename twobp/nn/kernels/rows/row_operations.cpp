#include "twobp/nn/kernels/rows/row_operations.h"

#include <algorithm>
#include <vector>

#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/kernels/rows/operators.h"
#include "twobp/nn/kernels/rows/row_kernels.h"
#include "twobp/nn/values.h"

namespace twobp {
namespace {

// The gain's gradient is summed over blocks of this many rows, then over the blocks. The sum is the same for any thread
// count.
constexpr int64_t kGainBlockRows = 64;

// The norms of all rows below each other: a view, or else a copy.
at::Tensor below_each_other(const at::Tensor& rows, int64_t cols) {
  return rows.unflatten(1, {-1, cols}).reshape({-1, cols});
}

// Whether the norms of all rows lie below each other in memory.
bool is_dense(const at::Tensor& rows) {
  return rows.stride(0) == rows.size(1);
}

}  // namespace

void rms_norm_rows(const at::Tensor& x, const at::Tensor& gain, double eps, at::Tensor& y, at::Tensor& rstd) {
  const int64_t cols = gain.numel();
  const int64_t norms = x.size(1) / cols;  // of a row
  if (by_operators(x)) {
    at::Tensor to = is_dense(y) ? y.view({-1, cols}) : at::empty({y.size(0) * norms, cols}, y.options());
    operators::rms_norm_forward(below_each_other(x, cols), gain, eps, to, rstd);
    if (!is_dense(y)) y.copy_(to.view(y.sizes()));
    return;
  }
  dispatch_float(x.scalar_type(), "RmsNorm", [&](auto zero) {
    using S = decltype(zero);
    const S* from = numbers<S>(x);
    const auto* weight = numbers<Compute<S>>(gain);
    S* to = mutable_numbers<S>(y);
    auto* scale = mutable_numbers<Compute<S>>(rstd);
    const bool dense = is_dense(x) && is_dense(y);
    for_rows(x.size(0), x.size(1), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end;) {
        const int64_t count = dense ? end - r : 1;
        kernels<S>().rms_norm_forward(from + r * x.stride(0), weight, to + r * y.stride(0), scale + r * norms,
                                      count * norms, cols, eps);
        r += count;
      }
    });
  });
}

at::Tensor rms_norm_rows_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& gain,
                                  const at::Tensor& rstd, at::Tensor& dx) {
  const int64_t cols = gain.numel();
  const int64_t norms = x.size(1) / cols;
  if (by_operators(x)) {
    at::Tensor to = is_dense(dx) ? dx.view({-1, cols}) : at::empty({dx.size(0) * norms, cols}, dx.options());
    const at::Tensor dgain =
        operators::rms_norm_backward(below_each_other(dy, cols), below_each_other(x, cols), gain, rstd, to);
    if (!is_dense(dx)) dx.copy_(to.view(dx.sizes()));
    return dgain;
  }
  const int64_t rows = x.size(0);
  const int64_t blocks = (rows + kGainBlockRows - 1) / kGainBlockRows;
  const at::Tensor dgain = at::zeros({blocks, cols}, gain.options());
  dispatch_float(x.scalar_type(), "RmsNorm", [&](auto zero) {
    using S = decltype(zero);
    const S* from = numbers<S>(x);
    const S* gradient = numbers<S>(dy);
    const auto* weight = numbers<Compute<S>>(gain);
    const auto* scale = numbers<Compute<S>>(rstd);
    S* to = mutable_numbers<S>(dx);
    auto* sums = mutable_numbers<Compute<S>>(dgain);
    const bool dense = is_dense(x) && is_dense(dy) && is_dense(dx);
    at::parallel_for(0, blocks, 1, [&](int64_t first, int64_t last) {
      for (int64_t r = first * kGainBlockRows; r < std::min(rows, last * kGainBlockRows);) {
        const int64_t block = r / kGainBlockRows;
        const int64_t count = dense ? std::min(rows, (block + 1) * kGainBlockRows) - r : 1;
        kernels<S>().rms_norm_backward(gradient + r * dy.stride(0), from + r * x.stride(0), weight, scale + r * norms,
                                       to + r * dx.stride(0), sums + block * cols, count * norms, cols);
        r += count;
      }
    });
  });
  return dgain.sum(0);
}

std::pair<at::Tensor, at::Tensor> rms_norm(const at::Tensor& x, const at::Tensor& gain, double eps) {
  const at::Tensor rows = x.view({-1, x.size(-1)});
  at::Tensor y = at::empty(rows.sizes(), x.options());
  at::Tensor rstd = at::empty({rows.size(0)}, gain.options());
  rms_norm_rows(rows, gain, eps, y, rstd);
  return {y.view(x.sizes()), std::move(rstd)};
}

at::Tensor rms_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& gain, const at::Tensor& rstd,
                             at::Tensor& dx) {
  const auto rows_of = [](const at::Tensor& tensor) { return tensor.view({-1, tensor.size(-1)}); };
  at::Tensor to = rows_of(dx);
  return rms_norm_rows_backward(rows_of(dy), rows_of(x), gain, rstd, to);
}

namespace {

const char* layer_of(Gate gate) {
  return gate == Gate::kSilu ? "SwiGlu" : "GeGlu";
}

GeluForm form_of(Gate gate) {
  return gate == Gate::kGelu ? GeluForm::kErf : GeluForm::kTanh;
}

}  // namespace

Gate parse_gate(const std::string& name) {
  if (name == "silu") return Gate::kSilu;
  if (name == "gelu") return Gate::kGelu;
  TWOBP_CHECK(name == "gelu_tanh", "the activation of a gated linear unit is \"", name.substr(0, 100),
              "\", but must be silu, gelu or gelu_tanh");
  return Gate::kGeluTanh;
}

at::Tensor glu(const at::Tensor& packed, Gate gate) {
  TWOBP_CHECK(packed.dim() > 0 && packed.size(-1) % 2 == 0, layer_of(gate),
              " takes gate and up packed in the last dimension, got ", packed.sizes());
  const int64_t cols = packed.size(-1) / 2;
  std::vector<int64_t> sizes = packed.sizes().vec();
  sizes.back() = cols;
  at::Tensor act = at::empty(sizes, packed.options());
  if (by_operators(packed)) {
    operators::glu_forward(packed, gate, act);
    return act;
  }
  dispatch_float(packed.scalar_type(), layer_of(gate), [&](auto zero) {
    using S = decltype(zero);
    const S* from = numbers<S>(packed);
    S* to = mutable_numbers<S>(act);
    const int64_t stride = row_stride(packed);
    for_rows(cols == 0 ? 0 : act.numel() / cols, cols, [&](int64_t begin, int64_t end) {
      const S* x = from + begin * stride;
      if (gate == Gate::kSilu) {
        kernels<S>().swiglu_forward(x, stride, to + begin * cols, end - begin, cols);
      } else {
        encoder_kernels<S>().geglu_forward(x, stride, to + begin * cols, end - begin, cols, form_of(gate));
      }
    });
  });
  return act;
}

void glu_backward(const at::Tensor& packed, const at::Tensor& dact, Gate gate, at::Tensor& dx) {
  const int64_t cols = packed.size(-1) / 2;
  std::vector<int64_t> sizes = packed.sizes().vec();
  sizes.back() = cols;
  TWOBP_CHECK(dact.sizes() == sizes, "the gradient ", dact.sizes(), " does not fit the output of ", layer_of(gate),
              ", ", at::IntArrayRef(sizes));
  if (by_operators(packed)) return operators::glu_backward(packed, dact, gate, dx);
  dispatch_float(packed.scalar_type(), layer_of(gate), [&](auto zero) {
    using S = decltype(zero);
    const S* from = numbers<S>(packed);
    const S* gradient = numbers<S>(dact);
    S* to = mutable_numbers<S>(dx);
    const int64_t stride = row_stride(packed);
    const int64_t dx_stride = row_stride(dx);
    for_rows(cols == 0 ? 0 : dact.numel() / cols, cols, [&](int64_t begin, int64_t end) {
      const S* x = from + begin * stride;
      const S* dy = gradient + begin * cols;
      S* d = to + begin * dx_stride;
      if (gate == Gate::kSilu) {
        kernels<S>().swiglu_backward(x, stride, dy, d, dx_stride, end - begin, cols);
      } else {
        encoder_kernels<S>().geglu_backward(x, stride, dy, d, dx_stride, end - begin, cols, form_of(gate));
      }
    });
  });
}

void rope(at::Tensor& packed, const at::Tensor& cos, const at::Tensor& sin, const RowHeads& heads, bool back) {
  if (by_operators(packed)) return operators::rope(packed, cos, sin, heads, back ? -1 : 1);
  dispatch_float(packed.scalar_type(), "Attention", [&](auto zero) {
    using S = decltype(zero);
    S* x = mutable_numbers<S>(packed) + heads.first;
    const int64_t stride = row_stride(packed);
    const int64_t positions = packed.size(1);
    const int64_t half = cos.size(-1);
    const auto* c = numbers<Compute<S>>(cos);
    const auto* s = numbers<Compute<S>>(sin);
    const auto sign = static_cast<Compute<S>>(back ? -1 : 1);
    for_rows(packed.size(0) * positions, 2 * heads.count * half, [&](int64_t begin, int64_t end) {
      kernels<S>().rope(x + begin * stride, c, s, sign, end - begin, begin, stride, heads.count, heads.step, half,
                        positions);
    });
  });
}

namespace {

// Operators compute a cap on a block of rows at a time, because each of their several copies is float32.
constexpr int64_t kCapBlockBytes = 32 << 20;

template <typename Visit>
void for_blocks(int64_t rows, int64_t cols, const Visit& visit) {
  const int64_t most = std::max<int64_t>(1, kCapBlockBytes / (cols * int64_t{sizeof(float)}));
  for (int64_t first = 0; first < rows; first += most) visit(first, std::min(most, rows - first));
}

at::Tensor capped_cross_entropy(at::Tensor& logits, const at::Tensor& labels, int64_t ignore, const LossFactor& scale,
                                bool gradient, double cap) {
  const at::Tensor all = logits.view({-1, logits.size(-1)});
  at::Tensor loss = at::zeros({}, logits.options().dtype(at::kDouble));
  for_blocks(all.size(0), all.size(1), [&](int64_t first, int64_t count) {
    at::Tensor rows = all.narrow(0, first, count);
    const at::Tensor slope = operators::soft_cap(rows, cap);
    loss += operators::cross_entropy(rows, labels.narrow(0, first, count), ignore, scale, gradient);
    if (gradient) rows.mul_(slope);
  });
  return loss;
}

void check_labels(const at::Tensor& labels, int64_t classes, int64_t ignore) {
  const int64_t* target = labels.const_data_ptr<int64_t>();
  for (int64_t r = 0; r < labels.numel(); ++r) {
    TWOBP_CHECK(target[r] == ignore || (target[r] >= 0 && target[r] < classes), "label ", target[r], " at position ", r,
                " of the micro-batch is outside the vocabulary of ", classes);
  }
}

}  // namespace

void soft_cap(at::Tensor& logits, double cap) {
  const int64_t cols = logits.size(-1);
  if (by_operators(logits)) {
    const at::Tensor all = logits.view({-1, cols});
    for_blocks(all.size(0), cols, [&](int64_t first, int64_t count) {
      at::Tensor rows = all.narrow(0, first, count);
      operators::soft_cap(rows, cap);
    });
    return;
  }
  dispatch_float(logits.scalar_type(), "CrossEntropy", [&](auto zero) {
    using S = decltype(zero);
    using T = Compute<S>;
    S* x = mutable_numbers<S>(logits);
    const int64_t stride = row_stride(logits);
    for_rows(logits.numel() / cols, cols, [&](int64_t begin, int64_t end) {
      std::vector<T> slope(static_cast<size_t>(cols));
      for (int64_t r = begin; r < end; ++r)
        kernels<S>().soft_cap(x + r * stride, slope.data(), cols, static_cast<T>(cap));
    });
  });
}

at::Tensor cross_entropy(at::Tensor& logits, const at::Tensor& labels, int64_t ignore, const LossFactor& scale,
                         bool gradient, double cap) {
  const int64_t cols = logits.size(-1);
  const int64_t rows = labels.numel();
  if (labels.is_cpu()) check_labels(labels, cols, ignore);
  if (by_operators(logits)) {
    const at::Tensor targets = on_device(labels.view({-1}), logits.device());
    return cap > 0 ? capped_cross_entropy(logits, targets, ignore, scale, gradient, cap)
                   : operators::cross_entropy(logits, targets, ignore, scale, gradient);
  }
  const double factor = scale.number();
  at::Tensor losses = at::empty({rows}, at::TensorOptions().dtype(at::kDouble));
  double* loss = losses.mutable_data_ptr<double>();
  const int64_t* target = labels.const_data_ptr<int64_t>();
  dispatch_float(logits.scalar_type(), "CrossEntropy", [&](auto zero) {
    using S = decltype(zero);
    using T = Compute<S>;
    S* x = mutable_numbers<S>(logits);
    const int64_t stride = row_stride(logits);
    for_rows(rows, cols, [&](int64_t begin, int64_t end) {
      if (cap > 0) {  // a row at a time, so that it is in the cache
        std::vector<T> slope(static_cast<size_t>(cols));
        for (int64_t r = begin; r < end; ++r) {
          S* const row = x + r * stride;
          kernels<S>().soft_cap(row, slope.data(), cols, static_cast<T>(cap));
          kernels<S>().cross_entropy(row, stride, target + r, loss + r, 1, cols, ignore, factor, gradient);
          if (gradient) kernels<S>().multiply(row, slope.data(), cols);
        }
        return;
      }
      kernels<S>().cross_entropy(x + begin * stride, stride, target + begin, loss + begin, end - begin, cols, ignore,
                                 factor, gradient);
    });
  });
  double sum = 0;
  for (int64_t r = 0; r < rows; ++r) sum += loss[r];
  return at::scalar_tensor(sum, at::TensorOptions().dtype(at::kDouble));
}

}  // namespace twobp
