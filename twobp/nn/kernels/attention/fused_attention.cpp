#include "twobp/nn/kernels/attention/fused_attention.h"

#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "twobp/nn/kernels/attention/packed_heads.h"

namespace twobp {
namespace {

bool by_flash(const at::Tensor& packed, const PackedAttention& attention) {
  return packed.scalar_type() != at::kFloat && !attention.shift.defined();
}

std::optional<double> scale_of(const PackedAttention& attention) {
  return attention.scale > 0 ? std::optional(attention.scale) : std::nullopt;
}

// What FlashAttention takes besides tensors.
struct FlashArguments {
  explicit FlashArguments(const PackedAttention& attention) : causal(attention.causal) {
    if (!attention.causal || attention.window == 0) return;
    left = attention.window - 1;
    right = 0;
  }
  bool causal;
  std::optional<int64_t> left, right;  // keys that a query sees before and behind its own
};

// What the memory-efficient kernels take besides tensors. They know no groups, so that keys and values are
// repeated for theirs.
struct EfficientArguments {
  EfficientArguments(const PackedHeads& heads, const PackedAttention& attention)
      : group(attention.heads / attention.kv_heads), mask(attention.causal ? kFromTheLast : kNone) {
    k = group == 1 ? heads.k : heads.k.repeat_interleave(group, 2);
    v = group == 1 ? heads.v : heads.v.repeat_interleave(group, 2);
    if (attention.causal && attention.window > 0) window = attention.window;
    if (!attention.shift.defined()) return;
    // They read rows that begin at multiples of 16 bytes.
    const int64_t batch = k.size(0), keys = k.size(1), even = (keys + 15) / 16 * 16;
    const at::Tensor shift = at::zeros({batch, even}, k.options()).narrow(1, 0, keys);
    shift.copy_(attention.shift);
    bias = shift.view({batch, 1, 1, keys}).expand({batch, attention.heads, heads.q.size(1), keys});
  }
  // The masks of the kernels: none, and causal with the last query at the last key.
  static constexpr int64_t kNone = 0, kFromTheLast = 2;

  int64_t group;
  int64_t mask;
  at::Tensor k, v;  // (B, P + S, H, D)
  std::optional<at::Tensor> bias;
  std::optional<int64_t> window;
};

// The kernels keep a row of sums for each head, whose length is a multiple of this.
constexpr int64_t kSumsAtOnce = 32;

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // of q, k and v

Gradients flash_gradients(const PackedHeads& heads, const PackedAttention& attention, const at::Tensor& out,
                          const at::Tensor& log_sum_exp, const at::Tensor& dout) {
  const FlashArguments with(attention);
  const at::Tensor no_state = at::empty({2}, out.options().dtype(at::kUInt64));  // of dropout
  return at::_flash_attention_backward(dout, heads.q, heads.k, heads.v, out, log_sum_exp, {}, {},
                                       heads.q.size(1), heads.k.size(1), /*dropout_p=*/0, with.causal,
                                       no_state, no_state, scale_of(attention), with.left, with.right);
}

Gradients efficient_gradients(const PackedHeads& heads, const PackedAttention& attention,
                              const at::Tensor& out, const at::Tensor& log_sum_exp, const at::Tensor& dout) {
  const EfficientArguments with(heads, attention);
  const int64_t positions = heads.q.size(1);
  const int64_t missing = (positions + kSumsAtOnce - 1) / kSumsAtOnce * kSumsAtOnce - positions;
  const at::Tensor sums =
      at::constant_pad_nd(log_sum_exp, {0, missing}, std::numeric_limits<double>::infinity());
  const at::Tensor no_state = at::empty({}, at::TensorOptions(at::kLong));  // of dropout
  auto [dq, dk, dv, dbias] = at::_efficient_attention_backward(
      dout, heads.q, with.k, with.v, with.bias, out, {}, {}, positions, with.k.size(1), sums,
      /*dropout_p=*/0, no_state, no_state, with.mask, /*bias_requires_grad=*/false, scale_of(attention),
      /*num_splits_key=*/{}, with.window);
  if (with.group == 1) return {dq, dk, dv};
  const std::vector<int64_t> groups{attention.kv_heads, with.group};
  return {dq, dk.unflatten(2, groups).sum(3), dv.unflatten(2, groups).sum(3)};
}

}  // namespace

bool takes_fused_attention(const at::Tensor& packed, const PackedAttention& attention) {
  const at::ScalarType type = packed.scalar_type();
  const bool known = type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
  return packed.is_cuda() && known && attention.head_dim % 8 == 0 && attention.head_dim <= 256 &&
         attention.dropout.threshold == 0 && !attention.starts.defined() && attention.cap == 0;
}

void fused_attention_forward(const at::Tensor& packed, const PackedAttention& attention, at::Tensor& out,
                             at::Tensor& log_sum_exp) {
  const PackedHeads heads(packed, attention);
  if (by_flash(packed, attention)) {
    const FlashArguments with(attention);
    const auto [y, sums, state, unused, mask] = at::_flash_attention_forward(
        heads.q, heads.k, heads.v, {}, {}, heads.q.size(1), heads.k.size(1), /*dropout_p=*/0, with.causal,
        /*return_debug_mask=*/false, scale_of(attention), with.left, with.right);
    out.copy_(y.flatten(2));
    log_sum_exp.copy_(sums);
    return;
  }
  const EfficientArguments with(heads, attention);
  const auto [y, sums, seed, offset, queries, keys] = at::_efficient_attention_forward(
      heads.q, with.k, with.v, with.bias, {}, {}, {}, {}, /*dropout_p=*/0, with.mask,
      /*compute_log_sumexp=*/true, scale_of(attention), /*seqlen_k=*/{}, with.window);
  out.copy_(y.flatten(2));
  log_sum_exp.copy_(sums.narrow(2, 0, log_sum_exp.size(2)));
}

void fused_attention_backward(const at::Tensor& packed, const PackedAttention& attention,
                              const at::Tensor& out, const at::Tensor& log_sum_exp, const at::Tensor& dout,
                              at::Tensor& dpacked) {
  const PackedHeads heads(packed, attention);
  const std::vector<int64_t> by_head{attention.heads, attention.head_dim};
  const auto [dq, dk, dv] = (by_flash(packed, attention) ? flash_gradients : efficient_gradients)(
      heads, attention, out.unflatten(2, by_head), log_sum_exp, dout.unflatten(2, by_head));
  give_gradients(attention, dq, dk, dv, dpacked);
}

}  // namespace twobp
