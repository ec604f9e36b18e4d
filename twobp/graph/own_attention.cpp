#include <cmath>
#include <optional>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/graph/apart_attention.h"
#include "twobp/graph/own_operators.h"
#include "twobp/nn/kernels/attention/packed_attention.h"
#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/kernels/rows/row_operations.h"
#include "twobp/nn/layers/attention_inputs.h"
#include "twobp/nn/values.h"

namespace twobp::graph {
namespace {

// Attention whose queries, keys and values are the packed rows of `qkv`.
struct PackedCall {
  PackedAttention shape;
  at::Tensor cos;
  at::Tensor sin;

  RowHeads rotated() const { return {shape.heads + shape.kv_heads, shape.head_dim}; }
};

// Arguments from `i`: cos, sin, heads, kv_heads, causal.
PackedCall packed_call(Arguments& arguments, size_t i, const at::Tensor& qkv) {
  PackedCall call;
  call.cos = arguments.maybe(i);
  call.sin = arguments.maybe(i + 1);
  call.shape.heads = arguments.integer(i + 2);
  call.shape.kv_heads = arguments.integer(i + 3);
  call.shape.causal = arguments.flag(i + 4);
  constexpr int64_t kMostHeads = 1 << 20;
  const auto [heads, kv] = std::pair(call.shape.heads, call.shape.kv_heads);
  TWOBP_CHECK(qkv.dim() == 3 && is_wide(qkv) && heads > 0 && heads <= kMostHeads && kv > 0 && heads % kv == 0 &&
                  qkv.size(2) > 0 && qkv.size(2) % (heads + 2 * kv) == 0,
              "twobp::attention takes packed heads (batch, positions, (heads + 2 kv_heads) n) in float32 or "
              "float64, not ",
              qkv.sizes(), " ", c10::toString(qkv.scalar_type()), " for ", heads, " heads and ", kv,
              " key-value heads");
  call.shape.head_dim = qkv.size(2) / (heads + 2 * kv);
  TWOBP_CHECK(call.cos.defined() == call.sin.defined(), "twobp::attention takes both cos and sin, or neither");
  if (call.cos.defined()) {
    check_tables(call.cos, call.sin, qkv.size(1), call.shape.head_dim, qkv.scalar_type());
    call.cos = call.cos.contiguous();
    call.sin = call.sin.contiguous();
  }
  return call;
}

// Adds the keys of earlier slices.
void add_earlier(PackedAttention& shape, const at::Tensor& qkv, const SliceCall& slice) {
  TWOBP_CHECK(shape.causal, "twobp::attention in both directions reads all positions, so it takes no slices");
  TWOBP_CHECK(slice.saved != nullptr,
              "twobp::attention_backward over a slice takes the log_sum_exp of twobp::attention itself");
  shape.earlier = earlier_keys(*slice.saved, shape, qkv.size(0), qkv.scalar_type());
  TWOBP_CHECK(shape.past() == slice.begin && qkv.size(1) == slice.length, "twobp::attention got ", qkv.size(1),
              " positions after ", shape.past(), " earlier ones, but the slice has ", slice.length, " after ",
              slice.begin);
}

// Takes over the gradient from later slices, and makes room for that of the earlier ones.
void take_over(PackedAttention& shape, const at::Tensor& qkv, const SliceCall& slice) {
  join_gradients(shape, *slice.saved);
  const at::Tensor& later = shape.from_later;
  const std::vector<int64_t> keys{qkv.size(0), qkv.size(1), 2 * shape.kv_heads * shape.head_dim};
  TWOBP_CHECK(!later.defined() || later.sizes() == keys, "the gradient of a slice's keys and values is ", later.sizes(),
              ", but must be ", at::IntArrayRef(keys));
}

void attention(Stack& stack, const SliceCall* slice) {
  Arguments arguments(stack, 6);
  at::Tensor qkv = arguments.tensor(0);
  PackedCall call = packed_call(arguments, 1, qkv);
  if (call.cos.defined()) {
    qkv = own_even_rows(std::move(qkv));
    rope(qkv, call.cos, call.sin, call.rotated(), /*back=*/false);
  } else {
    qkv = with_even_rows(std::move(qkv));
  }
  PackedAttention& shape = call.shape;
  if (slice != nullptr) {
    add_earlier(shape, qkv, *slice);
    leave_keys(qkv, shape, slice->keeps, *slice->saved);
  }
  at::Tensor out = at::empty({qkv.size(0), qkv.size(1), shape.heads * shape.head_dim}, qkv.options());
  at::Tensor log_sum_exp = at::empty({qkv.size(0), shape.heads, qkv.size(1)}, qkv.options());
  packed_attention_forward(qkv, shape, out, log_sum_exp);
  arguments.give(std::move(out), std::move(qkv), std::move(log_sum_exp));
}

void run_attention(Stack& stack) {
  attention(stack, nullptr);
}

void run_attention_of_slice(Stack& stack, const SliceCall& slice) {
  attention(stack, &slice);
}

void attention_backward(Stack& stack, const SliceCall* slice) {
  Arguments arguments(stack, 9);
  const at::Tensor dout = as_contiguous(arguments.tensor(0));
  at::Tensor qkv = with_even_rows(arguments.tensor(1));
  const at::Tensor out = as_contiguous(arguments.tensor(2));
  const at::Tensor log_sum_exp = as_contiguous(arguments.tensor(3));
  PackedCall call = packed_call(arguments, 4, qkv);
  const std::vector<int64_t> rows{qkv.size(0), qkv.size(1), call.shape.heads * call.shape.head_dim};
  const std::vector<int64_t> sums{qkv.size(0), call.shape.heads, qkv.size(1)};
  TWOBP_CHECK(dout.sizes() == rows && out.sizes() == rows && log_sum_exp.sizes() == sums &&
                  dout.scalar_type() == qkv.scalar_type() && out.scalar_type() == qkv.scalar_type() &&
                  log_sum_exp.scalar_type() == qkv.scalar_type(),
              "twobp::attention_backward takes what twobp::attention gave, and a gradient of its result");
  if (slice != nullptr) {
    add_earlier(call.shape, qkv, *slice);
    take_over(call.shape, qkv, *slice);
  }
  at::Tensor dqkv = exclusively_owned(qkv) ? qkv : at::empty(qkv.sizes(), qkv.options());
  packed_attention_backward(qkv, call.shape, out, log_sum_exp, dout, dqkv);
  if (call.cos.defined()) rope(dqkv, call.cos, call.sin, call.rotated(), /*back=*/true);
  arguments.give(std::move(dqkv));
}

void run_attention_backward(Stack& stack) {
  attention_backward(stack, nullptr);
}

void run_attention_backward_of_slice(Stack& stack, const SliceCall& slice) {
  attention_backward(stack, &slice);
}

// Causal attention of q (batch, heads, positions, n) and k, v (batch, kv_heads, positions, n).
struct ApartCall {
  at::Tensor q, k, v;
  std::optional<double> scale;

  PackedAttention shape() const {
    PackedAttention shape;
    shape.heads = q.size(1);
    shape.kv_heads = k.size(1);
    shape.head_dim = q.size(3);
    shape.causal = true;
    shape.scale = scale.value_or(0);
    return shape;
  }
  ApartAttention attention() const { return {/*causal=*/true, {}, scale}; }
  // Rows (q | k | v).
  at::Tensor packed() const { return at::cat({q, k, v}, 1).transpose(1, 2).flatten(2).contiguous(); }
};

// ATen's attention for CPUs trusts that the numbers of a head lie side by side. SDPA checks that at capture, but here
// they may be laid out in another way.
at::Tensor with_whole_heads(const at::Tensor& x) {
  return x.dim() == 0 || x.stride(-1) == 1 ? x : x.contiguous();
}

// Arguments from `i`: q, k, v; and the scale at `scale`.
ApartCall apart_call(Arguments& arguments, size_t i, size_t scale) {
  ApartCall call{with_whole_heads(arguments.tensor(i)), with_whole_heads(arguments.tensor(i + 1)),
                 with_whole_heads(arguments.tensor(i + 2)), arguments.maybe_number(scale)};
  const auto& [q, k, v, factor] = call;
  TWOBP_CHECK(q.dim() == 4 && k.dim() == 4 && is_wide(q) && q.numel() > 0 && k.numel() > 0 && v.sizes() == k.sizes() &&
                  k.size(0) == q.size(0) && q.size(1) % k.size(1) == 0 && k.size(2) == q.size(2) &&
                  k.size(3) == q.size(3) && k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type() &&
                  (!factor || (std::isfinite(*factor) && *factor > 0)),
              "twobp::causal_attention takes q (batch, heads, positions, n) and k, v (batch, kv_heads, "
              "positions, n) in float32 or float64, and a scale above 0, not ",
              q.sizes(), ", ", k.sizes(), " and ", v.sizes());
  return call;
}

void run_causal_attention(Stack& stack) {
  Arguments arguments(stack, 4);
  const ApartCall call = apart_call(arguments, 0, 3);
  if (attends_apart(call.q)) {
    auto [out, log_sum_exp] = apart_attention(call.q, call.k, call.v, call.attention());
    return arguments.give(std::move(out), std::move(log_sum_exp));
  }
  auto [out, log_sum_exp] = at::_scaled_dot_product_flash_attention_for_cpu(
      call.q, call.k, call.v, /*dropout_p=*/0, /*is_causal=*/true, /*attn_mask=*/{}, call.scale);
  arguments.give(std::move(out), std::move(log_sum_exp));
}

void run_causal_attention_of_slice(Stack& stack, const SliceCall& slice) {
  Arguments arguments(stack, 4);
  const ApartCall call = apart_call(arguments, 0, 3);
  const at::Tensor packed = call.packed();
  PackedAttention shape = call.shape();
  add_earlier(shape, packed, slice);
  leave_keys(packed, shape, /*keeps=*/false, *slice.saved);  // I has q, k and v as they are
  at::Tensor out = at::empty({packed.size(0), packed.size(1), shape.heads * shape.head_dim}, packed.options());
  at::Tensor log_sum_exp = at::empty({packed.size(0), shape.heads, packed.size(1)}, packed.options());
  packed_attention_forward(packed, shape, out, log_sum_exp);
  arguments.give(out.unflatten(2, {shape.heads, shape.head_dim}).transpose(1, 2), std::move(log_sum_exp));
}

// The arguments of the derivative: dout, q, k, v, out, log_sum_exp, scale.
struct ApartGradients {
  explicit ApartGradients(Arguments& arguments)
      : dout(with_whole_heads(arguments.tensor(0))),
        call(apart_call(arguments, 1, 6)),
        out(with_whole_heads(arguments.tensor(4))),
        log_sum_exp(arguments.tensor(5)) {
    TWOBP_CHECK(dout.sizes() == call.q.sizes() && out.sizes() == call.q.sizes() &&
                    log_sum_exp.sizes() == call.q.sizes().slice(0, 3) && dout.scalar_type() == call.q.scalar_type() &&
                    out.scalar_type() == call.q.scalar_type() && log_sum_exp.scalar_type() == call.q.scalar_type(),
                "twobp::causal_attention_backward takes what twobp::causal_attention took and gave, and a "
                "gradient of its result");
  }

  at::Tensor dout;
  ApartCall call;
  at::Tensor out;
  at::Tensor log_sum_exp;
};

void run_causal_attention_backward(Stack& stack) {
  Arguments arguments(stack, 7);
  const ApartGradients of(arguments);
  const ApartCall& call = of.call;
  if (attends_apart(call.q)) {
    auto [dq, dk, dv] =
        apart_attention_backward(of.dout, call.q, call.k, call.v, of.out, of.log_sum_exp, call.attention());
    return arguments.give(std::move(dq), std::move(dk), std::move(dv));
  }
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      of.dout, call.q, call.k, call.v, of.out, of.log_sum_exp, /*dropout_p=*/0, /*is_causal=*/true,
      /*attn_mask=*/{}, call.scale);
  arguments.give(std::move(dq), std::move(dk), std::move(dv));
}

void run_causal_attention_backward_of_slice(Stack& stack, const SliceCall& slice) {
  Arguments arguments(stack, 7);
  const ApartGradients of(arguments);
  at::Tensor packed = of.call.packed();
  PackedAttention shape = of.call.shape();
  add_earlier(shape, packed, slice);
  take_over(shape, packed, slice);
  const auto rows = [](const at::Tensor& x) { return x.transpose(1, 2).flatten(2).contiguous(); };
  packed_attention_backward(packed, shape, rows(of.out), as_contiguous(of.log_sum_exp), rows(of.dout), packed);
  const at::Tensor heads = packed.unflatten(2, {shape.heads + 2 * shape.kv_heads, shape.head_dim}).transpose(1, 2);
  arguments.give(heads.narrow(1, 0, shape.heads), heads.narrow(1, shape.heads, shape.kv_heads),
                 heads.narrow(1, shape.heads + shape.kv_heads, shape.kv_heads));
}

// ATen's attention for CPUs, with any mask. A GPU does not have it.
constexpr const char* kOfCpus = "aten::_scaled_dot_product_flash_attention_for_cpu";
constexpr const char* kOfCpusBackward = "aten::_scaled_dot_product_flash_attention_for_cpu_backward";

// The first `tensors` of the arguments are q, k, v and the like.
void call_aten(const char* name, Stack& stack, size_t tensors, size_t arguments) {
  for (size_t i = stack.size() - arguments; i < stack.size() - arguments + tensors; ++i)
    stack[i] = with_whole_heads(stack[i].toTensor());
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(stack);
}

// Arguments: `tensors` tensors, dropout_p, is_causal, attn_mask, scale.
ApartAttention attention_of(Arguments& arguments, size_t tensors) {
  TWOBP_CHECK(arguments.number(tensors) == 0, kOfCpus, " has dropout, which takes no seed");
  return {arguments.flag(tensors + 1), arguments.maybe(tensors + 2), arguments.maybe_number(tensors + 3)};
}

void run_attention_of_cpus(Stack& stack) {
  if (!attends_apart(stack[stack.size() - 7].toTensor())) return call_aten(kOfCpus, stack, 3, 7);
  Arguments arguments(stack, 7);
  const at::Tensor q = arguments.tensor(0), k = arguments.tensor(1), v = arguments.tensor(2);
  auto [out, log_sum_exp] = apart_attention(q, k, v, attention_of(arguments, 3));
  arguments.give(std::move(out), std::move(log_sum_exp));
}

void run_attention_of_cpus_backward(Stack& stack) {
  if (!attends_apart(stack[stack.size() - 9].toTensor())) return call_aten(kOfCpusBackward, stack, 6, 10);
  Arguments arguments(stack, 10);
  const at::Tensor dout = arguments.tensor(0), q = arguments.tensor(1), k = arguments.tensor(2);
  const at::Tensor v = arguments.tensor(3), out = arguments.tensor(4), log_sum_exp = arguments.tensor(5);
  auto [dq, dk, dv] = apart_attention_backward(dout, q, k, v, out, log_sum_exp, attention_of(arguments, 6));
  arguments.give(std::move(dq), std::move(dk), std::move(dv));
}

constexpr OwnOperator kReplacedAttention[] = {{kOfCpus, &run_attention_of_cpus},
                                              {kOfCpusBackward, &run_attention_of_cpus_backward}};

constexpr OwnOperator kAttention[] = {
    {"twobp::attention(Tensor qkv, Tensor? cos, Tensor? sin, int heads, int kv_heads, bool causal) -> "
     "(Tensor out, Tensor rotated, Tensor log_sum_exp)",
     &run_attention, &run_attention_of_slice},
    {"twobp::attention_backward(Tensor dout, Tensor rotated, Tensor out, Tensor log_sum_exp, Tensor? cos, "
     "Tensor? sin, int heads, int kv_heads, bool causal) -> Tensor dqkv",
     &run_attention_backward, &run_attention_backward_of_slice},
    {"twobp::causal_attention(Tensor q, Tensor k, Tensor v, float? scale) -> (Tensor out, Tensor "
     "log_sum_exp)",
     &run_causal_attention, &run_causal_attention_of_slice},
    {"twobp::causal_attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor "
     "log_sum_exp, float? scale) -> (Tensor dq, Tensor dk, Tensor dv)",
     &run_causal_attention_backward, &run_causal_attention_backward_of_slice}};

}  // namespace

std::span<const OwnOperator> attention_operators() {
  return kAttention;
}

std::span<const OwnOperator> replaced_attention_operators() {
  return kReplacedAttention;
}

}  // namespace twobp::graph
