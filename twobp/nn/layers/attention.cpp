#include "twobp/nn/layers/attention.h"

#include <algorithm>

#include "twobp/nn/kernels/gemm.h"
#include "twobp/nn/kernels/rows.h"

namespace twobp {

Attention::Attention(const AttentionShape& shape, at::ScalarType dtype) : shape_(shape), dtype_(dtype) {
  TWOBP_CHECK(shape.heads > 0 && shape.kv_heads > 0 && shape.heads % shape.kv_heads == 0, "attention with ",
              shape.heads, " heads cannot share ", shape.kv_heads,
              " key-value heads: the number of heads must be a multiple of it");
  TWOBP_CHECK(shape.head_dim > 0 && shape.head_dim % 2 == 0, "rotary embedding needs an even head_dim, got ",
              shape.head_dim);
}

void Attention::prepare_rope(int64_t positions) {
  if (cos_.defined() && cos_.size(0) >= positions) return;
  if (cos_.defined()) positions = std::max(positions, 2 * cos_.size(0));  // generation grows one by one
  const at::Tensor angle = at::outer(at::arange(positions, at::TensorOptions().dtype(at::kDouble)),
                                     rope_frequencies(shape_.rope, shape_.head_dim));
  cos_ = angle.cos().to(compute_type(dtype_));
  sin_ = angle.sin().to(compute_type(dtype_));
}

at::Tensor Attention::queries(const at::Tensor& packed) const {
  const int64_t batch = packed.size(0);
  const int64_t positions = packed.size(1);
  return packed.narrow(2, 0, shape_.heads * shape_.head_dim)
      .view({batch, positions, shape_.heads, shape_.head_dim})
      .transpose(1, 2);
}

at::Tensor Attention::keys_or_values(const at::Tensor& packed, int64_t first_head) const {
  const int64_t batch = packed.size(0);
  const int64_t positions = packed.size(1);
  const int64_t group = shape_.heads / shape_.kv_heads;
  at::Tensor heads = packed.narrow(2, first_head * shape_.head_dim, shape_.kv_heads * shape_.head_dim)
                         .view({batch, positions, shape_.kv_heads, shape_.head_dim})
                         .transpose(1, 2);
  if (group == 1) return heads;
  return heads.unsqueeze(2)
      .expand({batch, shape_.kv_heads, group, positions, shape_.head_dim})
      .reshape({batch, shape_.heads, positions, shape_.head_dim});
}

Values Attention::forward(Values values, Context& context, Saved& saved) {
  at::Tensor packed = std::move(values[0]);
  TWOBP_CHECK(packed.dim() == 3 && packed.size(2) == shape_.packed(), "attention takes (batch, sequence, ",
              shape_.packed(), "), got ", packed.sizes());
  TWOBP_CHECK(packed.scalar_type() == dtype_, "attention has dtype ", c10::toString(dtype_), ", got ",
              c10::toString(packed.scalar_type()));
  packed = exclusively_owned(packed) && packed.is_contiguous() ? packed
                                                               : packed.clone(at::MemoryFormat::Contiguous);
  const int64_t batch = packed.size(0);
  const int64_t positions = packed.size(1);
  const int64_t past = context.generating ? context.past : 0;
  prepare_rope(past + positions);
  dispatch_float(packed.scalar_type(), "Attention", [&](auto zero) {
    using S = decltype(zero);
    S* x = mutable_numbers<S>(packed);
    const int64_t half = shape_.head_dim / 2;
    const auto* cos = numbers<Compute<S>>(cos_) + past * half;
    const auto* sin = numbers<Compute<S>>(sin_) + past * half;
    const int64_t rotated = shape_.heads + shape_.kv_heads;
    for_rows(batch * positions, rotated * shape_.head_dim, [&](int64_t begin, int64_t end) {
      kernels<S>().rope_forward(x + begin * shape_.packed(), cos, sin, end - begin, begin, shape_.packed(),
                                rotated, half, positions);
    });
  });
  if (context.generating) return {with_cache(packed, context, saved.cache)};
  auto [out, log_sum_exp] = causal_attention(packed);
  // (B, H, S, D) in (B, S, H, D) memory: a view.
  at::Tensor y = out.transpose(1, 2).reshape({batch, positions, shape_.heads * shape_.head_dim});
  if (context.keeps()) {
    saved.keep_until_p1(std::move(packed));
    saved.keep_until_p1(std::move(out));
    saved.keep_until_p1(std::move(log_sum_exp));
  }
  return {std::move(y)};
}

std::pair<at::Tensor, at::Tensor> Attention::causal_attention(const at::Tensor& packed) const {
  const at::Tensor wide = packed.to(product_type(dtype_));
  auto [out, log_sum_exp] = at::_scaled_dot_product_flash_attention_for_cpu(
      queries(wide), keys_or_values(wide, shape_.heads), keys_or_values(wide, shape_.heads + shape_.kv_heads),
      /*dropout_p=*/0.0, /*is_causal=*/true);
  return {out.to(dtype_), log_sum_exp};
}

at::Tensor Attention::with_cache(const at::Tensor& packed, const Context& context, at::Tensor& cache) const {
  const int64_t batch = packed.size(0);
  const int64_t positions = packed.size(1);
  const int64_t past = context.past;
  TWOBP_CHECK(past == 0 || positions == 1, "generation goes on one position a call, got ", positions);
  TWOBP_CHECK(past + positions <= context.capacity, "generation at position ", past + positions,
              " is beyond the cache of ", context.capacity);
  const int64_t kv = shape_.kv_heads;
  const int64_t head_dim = shape_.head_dim;
  if (past == 0) cache = at::empty({2, batch, kv, context.capacity, head_dim}, packed.options());
  cache.narrow(3, past, positions)
      .copy_(packed.narrow(2, shape_.heads * head_dim, 2 * kv * head_dim)
                 .view({batch, positions, 2, kv, head_dim})
                 .permute({2, 0, 3, 1, 4}));
  at::Tensor out;  // (B, H, S, D)
  if (past == 0) {
    out = causal_attention(packed).first;
  } else {
    // The queries of a group as so many positions of their key-value head: nothing is repeated.
    const at::Tensor q = queries(packed).reshape({batch, kv, shape_.heads / kv, head_dim});
    out = std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(
        q, cache.select(0, 0).narrow(2, 0, past + 1), cache.select(0, 1).narrow(2, 0, past + 1),
        /*dropout_p=*/0.0, /*is_causal=*/false));
    out = out.reshape({batch, shape_.heads, 1, head_dim});
  }
  return out.transpose(1, 2).reshape({batch, positions, shape_.heads * head_dim});
}

Values Attention::backward_p1(Values values, Context& context, Saved& saved) {
  at::Tensor packed = saved.take_p1(0);
  const int64_t batch = packed.size(0);
  const int64_t positions = packed.size(1);
  const int64_t head_dim = shape_.head_dim;
  TWOBP_CHECK(values[0].dim() == 3 && values[0].size(0) == batch && values[0].size(1) == positions &&
                  values[0].size(2) == shape_.heads * head_dim,
              "the gradient ", values[0].sizes(), " does not fit the output of attention, (", batch, ", ",
              positions, ", ", shape_.heads * head_dim, ")");
  const at::ScalarType type = product_type(dtype_);
  const at::Tensor dy =
      values[0].reshape({batch, positions, shape_.heads, head_dim}).transpose(1, 2).to(type);
  at::Tensor wide = packed.to(type);
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      dy, queries(wide), keys_or_values(wide, shape_.heads),
      keys_or_values(wide, shape_.heads + shape_.kv_heads), saved.take_p1(1).to(type), saved.take_p1(2),
      /*dropout_p=*/0.0, /*is_causal=*/true);
  wide.reset();  // where it is `packed` itself, that is ours alone again
  // Back to (B, S, heads, D); queries of a group add up in their key-value head.
  const auto gathered = [&](const at::Tensor& gradient, int64_t heads) {
    at::Tensor rows = gradient.transpose(1, 2);
    if (heads != shape_.heads)
      rows = rows.view({batch, positions, heads, shape_.heads / heads, head_dim}).sum(3);
    return rows.to(dtype_).contiguous();
  };
  dq = gathered(dq, shape_.heads);
  dk = gathered(dk, shape_.kv_heads);
  dv = gathered(dv, shape_.kv_heads);
  at::Tensor dx = context.destination == nullptr && exclusively_owned(packed)
                      ? packed
                      : context.output(packed.sizes(), packed.options());
  dispatch_float(packed.scalar_type(), "Attention", [&](auto zero) {
    using S = decltype(zero);
    const auto* cos = numbers<Compute<S>>(cos_);
    const auto* sin = numbers<Compute<S>>(sin_);
    S* to = mutable_numbers<S>(dx);
    const S* q = numbers<S>(dq);
    const S* k = numbers<S>(dk);
    const int64_t stride = shape_.packed();
    const int64_t q_size = shape_.heads * head_dim;
    const int64_t kv_size = shape_.kv_heads * head_dim;
    for_rows(batch * positions, stride, [&](int64_t begin, int64_t end) {
      const int64_t rows = end - begin;
      S* row = to + begin * stride;
      kernels<S>().rope_backward(q + begin * q_size, cos, sin, row, rows, begin, stride, shape_.heads,
                                 head_dim / 2, positions);
      kernels<S>().rope_backward(k + begin * kv_size, cos, sin, row + q_size, rows, begin, stride,
                                 shape_.kv_heads, head_dim / 2, positions);
      const S* v = numbers<S>(dv) + begin * kv_size;
      for (int64_t r = 0; r < rows; ++r)
        std::copy_n(v + r * kv_size, kv_size, row + r * stride + q_size + kv_size);
    });
  });
  return {std::move(dx)};
}

}  // namespace twobp
