#include "twobp/nn/kernels/attention/fused_attention.h"

#include <vector>

#include "twobp/nn/kernels/attention/fused_heads.h"
#include "twobp/nn/kernels/attention/packed_heads.h"

namespace twobp {
namespace {

FusedHeads form_of(const at::Tensor& packed, const PackedAttention& attention) {
  FusedHeads form;
  if (attention.causal) {
    form.causal = FusedHeads::Causal::kFromLast;
    form.window = attention.window;
    if (attention.documents) form.documents = &attention.documents->rows_on(packed.device());
  }
  if (attention.scale > 0) form.scale = attention.scale;
  if (attention.shift.defined())
    form.bias = key_bias(attention.shift, attention.heads, packed.size(1), packed.scalar_type());
  form.dropout = attention.dropout;
  return form;
}

}  // namespace

bool takes_fused_attention(const at::Tensor& packed, const PackedAttention& attention) {
  const at::ScalarType type = packed.scalar_type();
  if (!fused_kernels_take(packed.device(), type, attention.head_dim) || attention.cap != 0) return false;
  const bool of_slice = attention.dropout.length > 0 || !attention.earlier.empty();
  if (attention.dropout.threshold > 0 && of_slice) return false;
  const bool documents = attention.causal && attention.documents;
  if (documents && (type == at::kFloat || attention.shift.defined() || of_slice)) return false;
  FusedHeads form;
  form.bias = attention.shift;
  form.dropout = attention.dropout;
  if (attention.causal) {
    form.causal = FusedHeads::Causal::kFromLast;
    form.window = attention.window;
  }
  const int64_t positions = packed.size(1);
  return fused_kernels_compute(type, packed.size(0), positions, attention.heads, attention.past() + positions, form);
}

void fused_attention_forward(const at::Tensor& packed, const PackedAttention& attention, at::Tensor& out,
                             at::Tensor& log_sum_exp) {
  const PackedHeads heads(packed, attention);
  const auto [y, sums] = fused_heads_forward(heads.q, heads.k, heads.v, form_of(packed, attention));
  out.copy_(y.flatten(2));
  log_sum_exp.copy_(sums);
}

void fused_attention_backward(const at::Tensor& packed, const PackedAttention& attention, const at::Tensor& out,
                              const at::Tensor& log_sum_exp, const at::Tensor& dout, at::Tensor& dpacked) {
  const PackedHeads heads(packed, attention);
  const std::vector<int64_t> by_head{attention.heads, attention.head_dim};
  const auto [dq, dk, dv] = fused_heads_backward(dout.unflatten(2, by_head), heads.q, heads.k, heads.v,
                                                 out.unflatten(2, by_head), log_sum_exp, form_of(packed, attention));
  give_gradients(attention, dq, dk, dv, dpacked);
}

}  // namespace twobp
