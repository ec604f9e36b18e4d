#include "twobp/nn/layers/attention.h"

#include <algorithm>

#include "twobp/nn/kernels/products/gemm.h"
#include "twobp/nn/kernels/products/padded_rows.h"
#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/kernels/rope.h"
#include "twobp/nn/layers/padding.h"

namespace twobp {
namespace {

// Memory for computing `tensor` in `type`: the tensor itself, or memory of its shape if `type` is wider.
at::Tensor in_type(const at::Tensor& tensor, at::ScalarType type) {
  return tensor.scalar_type() == type ? tensor : at::empty(tensor.sizes(), tensor.options().dtype(type));
}

// The queries that see nothing but padding, (B, S, 1): those before the sample's first token.
at::Tensor blind(const at::Tensor& padding) {
  return padding.cumprod(1).to(at::kBool).unsqueeze(2);
}

}  // namespace

Attention::Attention(const AttentionShape& shape, at::ScalarType dtype) : shape_(shape), dtype_(dtype) {
  TWOBP_CHECK(shape.heads > 0 && shape.kv_heads > 0 && shape.heads % shape.kv_heads == 0, "attention with ",
              shape.heads, " heads cannot share ", shape.kv_heads,
              " key-value heads: the number of heads must be a multiple of it");
  TWOBP_CHECK(shape.head_dim > 0 && shape.head_dim % 2 == 0, "rotary embedding needs an even head_dim, got ",
              shape.head_dim);
}

void Attention::prepare_rope(int64_t positions, at::Device device) {
  if (cos_.defined() && cos_.size(0) >= positions && cos_.device() == device) return;
  // Doubles the size, because generation adds one position at a time.
  if (cos_.defined()) positions = std::max(positions, 2 * cos_.size(0));
  const at::Tensor angle = at::outer(at::arange(positions, at::TensorOptions().dtype(at::kDouble)),
                                     rope_frequencies(shape_.rope, shape_.head_dim));
  cos_ = angle.cos().to(device, compute_type(dtype_));
  sin_ = angle.sin().to(device, compute_type(dtype_));
}

void Attention::rotate(at::Tensor& packed, int64_t past, bool back) const {
  const int64_t positions = packed.size(1);
  rope(packed, cos_.narrow(0, past, positions), sin_.narrow(0, past, positions),
       shape_.heads + shape_.kv_heads, back);
}

Values Attention::forward(Values values, Context& context, Saved& saved) {
  at::Tensor packed = std::move(values[0]);
  TWOBP_CHECK(packed.dim() == 3 && packed.size(2) == shape_.packed(), "attention takes (batch, sequence, ",
              shape_.packed(), "), got ", packed.sizes());
  TWOBP_CHECK(packed.scalar_type() == dtype_, "attention has dtype ", c10::toString(dtype_), ", got ",
              c10::toString(packed.scalar_type()));
  packed = own_even_rows(std::move(packed));
  const int64_t positions = packed.size(1);
  const int64_t past = context.generating ? context.past : 0;
  prepare_rope(past + positions, packed.device());
  rotate(packed, past, /*back=*/false);
  if (context.generating) return {with_cache(packed, context, saved.cache)};
  auto [y, log_sum_exp] = attend(packed, context);
  if (context.keeps()) {
    saved.keep_until_p1(std::move(packed));
    saved.keep_until_p1(y);
    saved.keep_until_p1(std::move(log_sum_exp));
  }
  return {std::move(y)};
}

std::pair<at::Tensor, at::Tensor> Attention::attend(const at::Tensor& packed, const Context& context) const {
  const int64_t batch = packed.size(0);
  const int64_t positions = packed.size(1);
  const at::Tensor wide = packed.to(compute_type(dtype_));
  at::Tensor y = at::empty({batch, positions, shape_.heads * shape_.head_dim}, packed.options());
  at::Tensor out = in_type(y, wide.scalar_type());
  at::Tensor log_sum_exp = at::empty({batch, shape_.heads, positions}, wide.options());
  const at::Tensor padding = padding_of(context, batch, positions, packed.device());
  packed_attention_forward(wide, shape_.causal(shift_of(padding, wide.options())), out, log_sum_exp);
  if (padding.defined()) out.masked_fill_(blind(padding), 0);
  if (!out.is_same(y)) y.copy_(out);
  return {std::move(y), std::move(log_sum_exp)};
}

at::Tensor Attention::with_cache(const at::Tensor& packed, Context& context, at::Tensor& cache) const {
  const int64_t batch = packed.size(0);
  const int64_t positions = packed.size(1);
  const int64_t past = context.past;
  TWOBP_CHECK(past == 0 || positions == 1, "generation takes one position per call after the prompt, got ",
              positions);
  TWOBP_CHECK(past + positions <= context.capacity, "generation at position ", past + positions,
              " is beyond the cache of ", context.capacity);
  const int64_t kv = shape_.kv_heads;
  const int64_t head_dim = shape_.head_dim;
  if (past == 0) cache = at::empty({2, batch, kv, context.capacity, head_dim}, packed.options());
  cache.narrow(3, past, positions)
      .copy_(packed.narrow(2, shape_.heads * head_dim, 2 * kv * head_dim)
                 .view({batch, positions, 2, kv, head_dim})
                 .permute({2, 0, 3, 1, 4}));
  if (past == 0) return attend(packed, context).first;
  // The queries of a group count as additional positions of their key-value head, so nothing is repeated.
  const at::Tensor q =
      packed.narrow(2, 0, shape_.heads * head_dim).reshape({batch, kv, shape_.heads / kv, head_dim});
  const at::Tensor out = std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(
      q, cache.select(0, 0).narrow(2, 0, past + 1), cache.select(0, 1).narrow(2, 0, past + 1),
      /*dropout_p=*/0.0, /*is_causal=*/false));
  return out.reshape({batch, 1, shape_.heads * head_dim});
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
  const at::ScalarType type = compute_type(dtype_);
  const at::Tensor padding = padding_of(context, batch, positions, packed.device());
  at::Tensor dy = as_contiguous(std::move(values[0])).to(type);
  if (padding.defined()) dy = dy.masked_fill(blind(padding), 0);
  const at::Tensor out = saved.take_p1(1).to(type);
  at::Tensor dx = exclusively_owned(packed) ? packed : at::empty(packed.sizes(), packed.options());
  const at::Tensor wide = packed.to(type);
  at::Tensor dwide = type == dtype_ ? dx : wide;  // a wider copy may be overwritten
  packed_attention_backward(wide, shape_.causal(shift_of(padding, wide.options())), out, saved.take_p1(2), dy,
                            dwide);
  if (!dwide.is_same(dx)) dx.copy_(dwide);
  rotate(dx, 0, /*back=*/true);
  return {std::move(dx)};
}

}  // namespace twobp
