#include "twobp/nn/layers/attention.h"

#include <algorithm>
#include <cmath>

#include "twobp/nn/device/device.h"
#include "twobp/nn/kernels/products/products.h"
#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/kernels/rows/row_operations.h"
#include "twobp/nn/layers/attention_inputs.h"

namespace twobp {
namespace {

// Memory for computing `tensor` in `type`: the tensor itself, or memory of its shape if `type` is wider.
at::Tensor in_type(const at::Tensor& tensor, at::ScalarType type) {
  return tensor.scalar_type() == type ? tensor : at::empty(tensor.sizes(), tensor.options().dtype(type));
}

}  // namespace

Attention::Attention(const AttentionShape& shape, at::ScalarType dtype, double dropout, std::string_view name,
                     const std::string& sinks, double init_std)
    : shape_(shape), rate_(dropout, name), dtype_(dtype) {
  if (!sinks.empty()) {
    sinks_.emplace(std::vector<ParameterPart>{{sinks, shape.heads}}, std::vector<int64_t>{shape.heads},
                   compute_type(dtype), init_std);
  }
  TWOBP_CHECK(shape.heads > 0 && shape.kv_heads > 0 && shape.heads % shape.kv_heads == 0, "attention with ",
              shape.heads, " heads cannot share ", shape.kv_heads,
              " key-value heads: the first number must be a multiple of the second");
  const int64_t rotary = shape.rotary_dims();
  TWOBP_CHECK(shape.head_dim > 0 && rotary <= shape.head_dim && rotary % 2 == 0,
              "rotary embedding needs an even head_dim, or an even part of it, got ", rotary, " of ", shape.head_dim);
  TWOBP_CHECK(shape.window >= 0, "attention has a window of ", shape.window,
              " keys: it must be at least 1, or 0 for no window");
  TWOBP_CHECK(!shape.interleaved || shape.heads == shape.kv_heads,
              "attention with interleaved queries, keys and values needs as many key-value heads as heads");
  TWOBP_CHECK(
      !shape.interleaved || (shape.value_dim == 0 && !shape.rotary_last),
      "attention with interleaved queries, keys and values has values as wide as keys, whose first features turn");
}

void Attention::prepare_rope(int64_t positions, at::Device device) {
  const bool same = cos_.defined() && shape_.rope.beyond(length_) == shape_.rope.beyond(positions);
  length_ = positions;
  if (same && cos_.size(0) >= positions && cos_.device() == device) return;
  const at::Tensor angle = at::outer(at::arange(positions, at::TensorOptions().dtype(at::kDouble)),
                                     rope_frequencies(shape_.rope, shape_.rotary_dims(), length_));
  const double magnitude = rope_magnitude(shape_.rope);
  cos_ = angle.cos().mul_(magnitude).to(device, compute_type(dtype_));
  sin_ = angle.sin().mul_(magnitude).to(device, compute_type(dtype_));
}

void Attention::rotate(at::Tensor& packed, int64_t past, bool back) const {
  if (shape_.rotary_dims() == 0) return;
  const at::Tensor cos = cos_.narrow(0, past, packed.size(1));
  const at::Tensor sin = sin_.narrow(0, past, packed.size(1));
  const int64_t dim = shape_.head_dim;
  const int64_t first = shape_.rotary_last ? dim - shape_.rotary_dims() : 0;
  if (!shape_.interleaved) return rope(packed, cos, sin, {shape_.heads + shape_.kv_heads, dim, first}, back);
  rope(packed, cos, sin, {shape_.heads, 3 * dim}, back);
  rope(packed, cos, sin, {shape_.heads, 3 * dim, dim}, back);
}

PackedAttention Attention::form(const Context& context, const at::Tensor& padding, const at::Tensor& packed,
                                const Saved& saved) const {
  auto documents = documents_of(context, packed.size(0), packed.size(1));
  TWOBP_CHECK(!documents || shape_.rope.beyond(length_) == 0, "beyond ", shape_.rope.original_positions,
              " positions, this model's rotary embedding depends on the length of the whole sequence, so it "
              "cannot keep the documents of a sample apart: shorten data.sequence to that");
  const at::TensorOptions wide = packed.options().dtype(compute_type(dtype_));
  PackedAttention attention = shape_.causal(shift_of(padding, wide), rate_.mask(context), std::move(documents));
  if (!context.sliced()) return attention;
  attention.earlier = earlier_keys(saved, attention, packed.size(0), dtype_);
  const at::ScalarType type = attention_type(packed, attention);  // depends on whether there are any
  for (EarlierKeys& keys : attention.earlier) keys.rows = keys.rows.to(type);
  return attention;
}

at::Tensor Attention::blind(const at::Tensor& padding, const PackedAttention& attention, int64_t past) const {
  const at::Tensor tokens = padding.logical_not().cumsum(1);
  const at::Tensor up_to_own = tokens.narrow(1, past, tokens.size(1) - past);
  const auto options = tokens.options();
  at::Tensor first = attention.documents ? attention.documents->starts_on(tokens.device()) : at::zeros_like(up_to_own);
  if (shape_.window > 0) {
    const int64_t begin = past + 1 - shape_.window;
    first = at::maximum(first, at::arange(begin, begin + up_to_own.size(1), options).unsqueeze(0));
  }
  const at::Tensor before = tokens.gather(1, (first - 1).clamp_min_(0)).masked_fill_(first.eq(0), 0);
  return up_to_own.eq(before).unsqueeze(2);
}

Values Attention::forward(Values values, Context& context, Saved& saved) {
  at::Tensor packed = std::move(values[0]);
  TWOBP_CHECK(packed.dim() == 3 && packed.size(2) == shape_.packed(), "attention takes (batch, sequence, ",
              shape_.packed(), "), got ", packed.sizes());
  TWOBP_CHECK(packed.scalar_type() == dtype_, "attention has dtype ", c10::toString(dtype_), ", got ",
              c10::toString(packed.scalar_type()));
  packed = own_even_rows(std::move(packed));
  const int64_t positions = packed.size(1);
  const int64_t past = context.past;
  if (shape_.rotary_dims() > 0) {
    prepare_rope(context.sliced() ? context.slice.positions : past + positions, packed.device());
  }
  rotate(packed, past, /*back=*/false);
  if (context.sliced()) leave_keys(packed, shape_.causal(), context.keeps(), saved);
  auto [y, log_sum_exp] = attend(packed, context, saved);
  if (context.keeps()) {
    saved.keep_until_p1(std::move(packed));
    saved.keep_until_p1(y);
    saved.keep_until_p1(std::move(log_sum_exp));
  }
  return {std::move(y)};
}

std::pair<at::Tensor, at::Tensor> Attention::attend(const at::Tensor& packed, const Context& context,
                                                    const Saved& saved) const {
  const int64_t batch = packed.size(0);
  const int64_t positions = packed.size(1);
  const int64_t past = context.sliced() ? context.past : 0;
  const at::Tensor padding = padding_of(context, batch, past + positions, packed.device());
  const PackedAttention attention = form(context, padding, packed, saved);
  const at::Tensor in = packed.to(attention_type(packed, attention));
  at::Tensor y = at::empty({batch, positions, attention.out_width()}, packed.options());
  at::Tensor out = in_type(y, in.scalar_type());
  at::Tensor log_sum_exp = at::empty({batch, shape_.heads, positions}, packed.options().dtype(compute_type(dtype_)));
  packed_attention_forward(in, attention, out, log_sum_exp);
  if (sinks_) {
    // With the sink among the scores, the sum of their exponentials grows, and the output shrinks as much.
    const at::Tensor sinks = sinks_->value.view({-1, 1});
    const at::Tensor share = at::sigmoid(log_sum_exp - sinks).transpose(1, 2).unsqueeze(3);
    out.unflatten(2, {shape_.heads, attention.value_width()}).mul_(share.to(out.scalar_type()));
    log_sum_exp = at::logaddexp(log_sum_exp, sinks);
  }
  if (padding.defined()) out.masked_fill_(blind(padding, attention, past), 0);
  if (!out.is_same(y)) y.copy_(out);
  return {std::move(y), std::move(log_sum_exp)};
}

Values Attention::backward_p1(Values values, Context& context, Saved& saved) {
  at::Tensor packed = saved.take_p1(0);
  const int64_t batch = packed.size(0);
  const int64_t positions = packed.size(1);
  const int64_t width = shape_.causal().out_width();
  TWOBP_CHECK(values[0].dim() == 3 && values[0].size(0) == batch && values[0].size(1) == positions &&
                  values[0].size(2) == width,
              "the gradient ", values[0].sizes(), " does not fit the output of attention, (", batch, ", ", positions,
              ", ", width, ")");
  const at::Tensor padding = padding_of(context, batch, context.past + positions, packed.device());
  PackedAttention attention = form(context, padding, packed, saved);
  const at::ScalarType type = attention_type(packed, attention);
  at::Tensor dy = as_contiguous(std::move(values[0])).to(type);
  if (padding.defined()) dy = dy.masked_fill(blind(padding, attention, context.past), 0);
  if (context.sliced()) join_gradients(attention, saved);
  const at::Tensor out = saved.take_p1(1).to(type);
  at::Tensor dx = exclusively_owned(packed) ? packed : at::empty(packed.sizes(), packed.options());
  const at::Tensor wide = packed.to(type);
  at::Tensor dwide = type == dtype_ ? dx : wide;  // a wider copy may be overwritten
  const at::Tensor log_sum_exp = saved.take_p1(2);
  if (sinks_ && sinks_->trainable()) {
    // Of a softmax: dL/dscore = probability (its own dL/dprobability, which is 0, - their mean, dy y).
    const std::vector<int64_t> heads = {batch * positions, shape_.heads, width / shape_.heads};
    const auto wide_type = log_sum_exp.scalar_type();
    const at::Tensor mean = (dy.view(heads).to(wide_type) * out.view(heads).to(wide_type)).sum(2);
    const at::Tensor share = at::exp(sinks_->value.view({-1, 1}) - log_sum_exp).transpose(1, 2).reshape(mean.sizes());
    add_sum_of_rows(sinks_->grad_to_add(), -mean * share);
  }
  packed_attention_backward(wide, attention, out, log_sum_exp, dy, dwide);
  if (!dwide.is_same(dx)) dx.copy_(dwide);
  rotate(dx, context.past, /*back=*/true);
  return {std::move(dx)};
}

BidirectionalAttention::BidirectionalAttention(const BidirectionalAttentionShape& shape, double dropout,
                                               std::string_view name, at::ScalarType dtype)
    : shape_(shape), rate_(dropout, name), dtype_(dtype) {
  TWOBP_CHECK(shape.heads > 0 && shape.head_dim > 0, "attention needs heads and head_dim of at least 1, got ",
              shape.heads, " heads of ", shape.head_dim);
}

PackedAttention BidirectionalAttention::settings(const Context& context, const at::Tensor& packed) const {
  const at::Tensor padding = padding_of(context, packed.size(0), packed.size(1), packed.device());
  return {shape_.heads,       shape_.heads,
          shape_.head_dim,
          /*causal=*/false,   shift_of(padding, packed.options().dtype(compute_type(dtype_))),
          rate_.mask(context)};
}

Values BidirectionalAttention::forward(Values values, Context& context, Saved& saved) {
  at::Tensor packed = with_even_rows(std::move(values[0]));
  TWOBP_CHECK(packed.dim() == 3 && packed.size(2) == 3 * shape_.width(), "attention takes (batch, sequence, ",
              3 * shape_.width(), "), got ", packed.sizes());
  TWOBP_CHECK(packed.scalar_type() == dtype_, "attention has dtype ", c10::toString(dtype_), ", got ",
              c10::toString(packed.scalar_type()));
  const int64_t batch = packed.size(0);
  const int64_t positions = packed.size(1);
  const std::vector<int64_t> sizes = {batch, positions, shape_.width()};
  const PackedAttention attention = settings(context, packed);
  const at::Tensor in = packed.to(attention_type(packed, attention));
  at::Tensor log_sum = at::empty({batch, shape_.heads, positions}, packed.options().dtype(compute_type(dtype_)));
  at::Tensor out = at::empty(sizes, packed.options());
  if (in.is_same(packed)) {
    packed_attention_forward(in, attention, out, log_sum);
  } else {
    at::Tensor wide_out = at::empty(sizes, in.options());
    packed_attention_forward(in, attention, wide_out, log_sum);
    out.copy_(wide_out);
  }
  if (context.keeps()) {
    saved.keep_until_p1(std::move(packed));
    saved.keep_until_p1(out);
    saved.keep_until_p1(std::move(log_sum));
  }
  return {std::move(out)};
}

Values BidirectionalAttention::backward_p1(Values values, Context& context, Saved& saved) {
  at::Tensor packed = saved.take_p1(0);
  const at::Tensor out = saved.take_p1(1);
  const at::Tensor log_sum = saved.take_p1(2);
  TWOBP_CHECK(values[0].sizes() == out.sizes(), "the gradient ", values[0].sizes(),
              " does not fit the output of attention, ", out.sizes());
  const PackedAttention attention = settings(context, packed);
  const at::ScalarType type = attention_type(packed, attention);
  const at::Tensor dy = as_contiguous(std::move(values[0])).to(type);
  if (type == dtype_) {
    at::Tensor dx = exclusively_owned(packed) ? packed : at::empty(packed.sizes(), packed.options());
    packed_attention_backward(packed, attention, out, log_sum, dy, dx);
    return {std::move(dx)};
  }
  at::Tensor wide = packed.to(type);
  packed_attention_backward(wide, attention, out.to(type), log_sum, dy, wide);
  at::Tensor dx = at::empty(packed.sizes(), packed.options());
  dx.copy_(wide);
  return {std::move(dx)};
}

}  // namespace twobp
