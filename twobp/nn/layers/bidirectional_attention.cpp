#include "twobp/nn/layers/bidirectional_attention.h"

#include "twobp/nn/kernels/products/padded_rows.h"
#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/layers/padding.h"

namespace twobp {
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
