#include "twobp/nn/kernels/attention/flash_attention.h"

#include <optional>
#include <vector>

namespace twobp {
namespace {

// q (B, S, H, D), k and v (B, P + S, K, D): views of the rows, or copies behind those of earlier slices.
struct Heads {
  Heads(const at::Tensor& packed, const PackedAttention& attention) : attention(attention) {
    q = part(packed, attention.q_column(0), attention.heads, attention.interleaved);
    k = keys(packed, /*value=*/false);
    v = keys(packed, /*value=*/true);
  }

  at::Tensor part(const at::Tensor& rows, int64_t column, int64_t count, bool interleaved) const {
    const int64_t dim = attention.head_dim;
    return rows.narrow(2, column, rows.size(2) - column)
        .as_strided({rows.size(0), rows.size(1), count, dim},
                    {rows.stride(0), rows.stride(1), interleaved ? 3 * dim : dim, 1});
  }

  at::Tensor keys(const at::Tensor& packed, bool value) const {
    const int64_t count = attention.kv_heads;
    const int64_t column = value ? attention.v_column(0) : attention.k_column(0);
    std::vector<at::Tensor> all;
    for (const EarlierKeys& earlier : attention.earlier) {
      const int64_t apart = value ? count * attention.head_dim : 0;
      all.push_back(part(earlier.rows, earlier.packed ? column : apart, count,
                         earlier.packed && attention.interleaved));
    }
    all.push_back(part(packed, column, count, attention.interleaved));
    return all.size() == 1 ? all[0] : at::cat(all, 1);
  }

  const PackedAttention& attention;
  at::Tensor q, k, v;
};

// What both kernels take besides tensors.
struct Arguments {
  explicit Arguments(const PackedAttention& attention) : causal(attention.causal) {
    if (attention.scale > 0) scale = attention.scale;
    if (!attention.causal || attention.window == 0) return;
    left = attention.window - 1;
    right = 0;
  }
  bool causal;
  std::optional<double> scale;
  std::optional<int64_t> left, right;  // keys that a query sees before and behind its own
};

// Adds the gradient of keys or values (B, L, K, D) to one half of `sum` (B, L, 2 K D).
void add_half(const at::Tensor& sum, int64_t half, const at::Tensor& gradient) {
  sum.chunk(2, 2)[half].add_(gradient.flatten(2));
}

}  // namespace

bool takes_flash_attention(const at::Tensor& packed, const PackedAttention& attention) {
  const bool narrow = packed.scalar_type() == at::kBFloat16 || packed.scalar_type() == at::kHalf;
  return packed.is_cuda() && narrow && attention.head_dim % 8 == 0 && attention.head_dim <= 256 &&
         attention.dropout.threshold == 0 && !attention.shift.defined() && !attention.starts.defined() &&
         attention.cap == 0;
}

void flash_attention_forward(const at::Tensor& packed, const PackedAttention& attention, at::Tensor& out,
                             at::Tensor& log_sum_exp) {
  const Heads heads(packed, attention);
  const Arguments with(attention);
  const auto [y, sums, state, unused, mask] = at::_flash_attention_forward(
      heads.q, heads.k, heads.v, {}, {}, heads.q.size(1), heads.k.size(1), /*dropout_p=*/0, with.causal,
      /*return_debug_mask=*/false, with.scale, with.left, with.right);
  out.copy_(y.flatten(2));
  log_sum_exp.copy_(sums);
}

void flash_attention_backward(const at::Tensor& packed, const PackedAttention& attention,
                              const at::Tensor& out, const at::Tensor& log_sum_exp, const at::Tensor& dout,
                              at::Tensor& dpacked) {
  const Heads heads(packed, attention);
  const Arguments with(attention);
  const std::vector<int64_t> by_head{attention.heads, attention.head_dim};
  const at::Tensor no_state = at::empty({2}, packed.options().dtype(at::kUInt64));  // of dropout
  auto [dq, dk, dv] = at::_flash_attention_backward(
      dout.unflatten(2, by_head), heads.q, heads.k, heads.v, out.unflatten(2, by_head), log_sum_exp, {}, {},
      heads.q.size(1), heads.k.size(1), /*dropout_p=*/0, with.causal, no_state, no_state, with.scale,
      with.left, with.right);
  int64_t begin = 0;
  for (const EarlierKeys& earlier : attention.earlier) {
    const int64_t count = earlier.rows.size(1);
    add_half(earlier.gradient, 0, dk.narrow(1, begin, count));
    add_half(earlier.gradient, 1, dv.narrow(1, begin, count));
    begin += count;
  }
  if (begin > 0) {
    dk = dk.narrow(1, begin, packed.size(1));
    dv = dv.narrow(1, begin, packed.size(1));
  }
  if (attention.from_later.defined()) {
    const std::vector<at::Tensor> later = attention.from_later.chunk(2, 2);
    dk = later[0].unflatten(2, {attention.kv_heads, attention.head_dim}) + dk;
    dv = later[1].unflatten(2, {attention.kv_heads, attention.head_dim}) + dv;
  }
  const auto part = [&](int64_t column, int64_t count) {
    return heads.part(dpacked, column, count, attention.interleaved);
  };
  part(attention.q_column(0), attention.heads).copy_(dq);
  part(attention.k_column(0), attention.kv_heads).copy_(dk);
  part(attention.v_column(0), attention.kv_heads).copy_(dv);
}

}  // namespace twobp
