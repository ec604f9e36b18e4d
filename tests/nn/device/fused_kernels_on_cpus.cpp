#include "tests/nn/device/fused_kernels_on_cpus.h"

#include <chrono>
#include <cmath>
#include <limits>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <torch/library.h>

#include "twobp/core/random.h"
#include "twobp/nn/kernels/attention/fused_heads.h"

namespace twobp::test {
namespace {

using Kernel = FusedCall::Kernel;

static_assert(static_cast<int64_t>(FusedHeads::Causal::kNo) == static_cast<int64_t>(sdp::CustomMaskType::NoCustomMask));
static_assert(static_cast<int64_t>(FusedHeads::Causal::kFromFirst) ==
              static_cast<int64_t>(sdp::CustomMaskType::CausalFromTopLeft));
static_assert(static_cast<int64_t>(FusedHeads::Causal::kFromLast) ==
              static_cast<int64_t>(sdp::CustomMaskType::CausalFromBottomRight));

constexpr double kInfinity = std::numeric_limits<double>::infinity();

FusedCall& last_call() {
  static thread_local FusedCall call;
  return call;
}

// The arguments of an operator by their names, which do not depend on the version of LibTorch.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack) : arguments_(op.schema().arguments()) {
    values_ = torch::jit::pop(stack, arguments_.size());
  }

  at::Tensor tensor(const char* name) const {
    const c10::IValue& value = of(name);
    return value.isNone() ? at::Tensor() : value.toTensor();
  }
  int64_t integer(const char* name, int64_t otherwise = -1) const {
    const c10::IValue& value = of(name);
    return value.isNone() ? otherwise : value.toInt();
  }
  double number(const char* name, double otherwise = 0) const {
    const c10::IValue& value = of(name);
    return value.isNone() ? otherwise : value.toDouble();
  }
  bool flag(const char* name) const { return of(name).toBool(); }
  // Arguments that twobp does not use.
  void lacks(std::initializer_list<const char*> names) const {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      for (const char* const name : names) {
        if (arguments_[i].name() != name) continue;
        TORCH_CHECK(values_[i].isNone() || (values_[i].isTensor() && !values_[i].toTensor().defined()), name);
      }
    }
  }

 private:
  const c10::IValue& of(const char* name) const {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (arguments_[i].name() == name) return values_[i];
    }
    TORCH_CHECK(false, "no argument ", name);
  }

  const std::vector<c10::Argument>& arguments_;
  std::vector<c10::IValue> values_;
};

// Whether loads of 16 bytes are aligned. Dimensions of one number have no stride.
void check_alignment(const at::Tensor& x, const char* name) {
  const int64_t numbers = 16 / static_cast<int64_t>(x.element_size());
  TORCH_CHECK(x.stride(-1) == 1, name, " must have contiguous last dimension");
  TORCH_CHECK(reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0, name, " begins at an odd place");
  for (int64_t i = 0; i + 1 < x.dim(); ++i)
    TORCH_CHECK(x.size(i) <= 1 || x.stride(i) % numbers == 0, name, " is not correctly aligned: ", x.strides());
}

void check_heads(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t dim) {
  TORCH_CHECK(q.dim() == dim && k.dim() == dim && v.dim() == dim, "dimensions of heads");
  TORCH_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(), "dtypes of heads");
  TORCH_CHECK(k.sizes() == v.sizes() && k.size(-1) == q.size(-1) && (dim < 4 || k.size(0) == q.size(0)),
              "sizes of heads: ", q.sizes(), k.sizes(), v.sizes());
  check_alignment(q, "query");
  check_alignment(k, "key");
  check_alignment(v, "value");
}

// What the default generator gives. It must have been made anew with a seed, and no one else may draw meanwhile.
uint64_t draw_seed() {
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  std::this_thread::sleep_for(std::chrono::microseconds(200));  // so that others can come between
  const std::scoped_lock lock(generator.mutex());
  const uint64_t seed = generator.current_seed();
  const at::Generator fresh = at::make_generator<at::CPUGeneratorImpl>(seed);
  TORCH_CHECK(generator.get_state().equal(fresh.get_state()), "the generator has drawn since it got its seed");
  TORCH_CHECK(seed >> 63 == 0, "the seed ", seed, " is no int64");
  generator.get<at::CPUGeneratorImpl>()->random64();
  return seed;
}

struct Form {
  at::Tensor hidden;   // (S, L) bool; undefined: none
  at::Tensor bias;     // (B, H, S, L)
  at::Tensor factors;  // of dropout
  double scale = 1;
};

double scale_of(const Call& call, const at::Tensor& q) {
  return call.number("scale", 1 / std::sqrt(static_cast<double>(q.size(-1))));
}

// The keys that queries do not see: key j of query i with j > i + right or j < i - left.
at::Tensor hidden_keys(int64_t queries, int64_t keys, int64_t left, int64_t right) {
  const at::Tensor distance = at::arange(keys).unsqueeze(0) - at::arange(queries).unsqueeze(1);
  return distance.gt(right).logical_or_(distance.lt(-left));
}

at::Tensor wide(const at::Tensor& heads, int64_t group = 1) {  // (B, S, H, D) to (B, H, S, D)
  return heads.to(at::kDouble).transpose(1, 2).repeat_interleave(group, 1);
}

at::Tensor scores_of(const at::Tensor& q, const at::Tensor& k, const Form& form) {
  at::Tensor scores = at::matmul(q, k.transpose(2, 3)) * form.scale;
  if (form.bias.defined()) scores = scores + form.bias;
  if (form.hidden.defined()) scores = scores.masked_fill(form.hidden, -kInfinity);
  return scores;
}

struct Sums {
  at::Tensor out, log_sum_exp;
};

// out (B, S, H, D) and log_sum_exp (B, H, S), both of float64. A query that sees no key has 0 in both.
Sums attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Form& form) {
  const int64_t group = q.size(2) / k.size(2);
  const at::Tensor scores = scores_of(wide(q), wide(k, group), form);
  const at::Tensor sums = scores.logsumexp(3).masked_fill(scores.eq(-kInfinity).all(3), 0);
  at::Tensor p = scores.sub(sums.unsqueeze(3)).exp();
  if (form.factors.defined()) p = p * form.factors;
  return {at::matmul(p, wide(v, group)).transpose(1, 2), sums};
}

struct Gradients {
  at::Tensor q, k, v;
};

// As the kernels: from the sums and the result that they are given.
Gradients attend_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& out, const at::Tensor& sums, const Form& form) {
  const int64_t group = q.size(2) / k.size(2);
  const at::Tensor wide_q = wide(q), wide_k = wide(k, group), wide_v = wide(v, group), dy = wide(dout);
  const at::Tensor p = scores_of(wide_q, wide_k, form).sub(sums.to(at::kDouble).unsqueeze(3)).exp();
  const at::Tensor dropped = form.factors.defined() ? p * form.factors : p;
  at::Tensor dp = at::matmul(dy, wide_v.transpose(2, 3));
  if (form.factors.defined()) dp = dp * form.factors;
  const at::Tensor ds = p * (dp - (dy * wide(out)).sum(3, true)) * form.scale;
  const auto of_group = [&](const at::Tensor& x) { return x.unflatten(1, {k.size(2), group}).sum(2).transpose(1, 2); };
  return {at::matmul(ds, wide_k).transpose(1, 2), of_group(at::matmul(ds.transpose(2, 3), wide_q)),
          of_group(at::matmul(dropped.transpose(2, 3), dy))};
}

// FlashAttention (flash_api.cpp).
struct Flash {
  explicit Flash(const Call& call)
      : q(call.tensor("query")),
        k(call.tensor("key")),
        v(call.tensor("value")),
        bounds(call.tensor("cum_seq_q")),
        causal(call.flag("is_causal")),
        left(call.integer("window_size_left")),
        right(call.integer("window_size_right")),
        queries(call.integer("max_q")),
        keys(call.integer("max_k")),
        p(call.number("dropout_p")),
        scale(scale_of(call, q)) {
    check_heads(q, k, v, bounds.defined() ? 3 : 4);
    TORCH_CHECK(q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16,
                "FlashAttention only support fp16 and bf16 data type");
    TORCH_CHECK(q.size(-1) % 8 == 0 && q.size(-1) <= 256 && q.size(-2) % k.size(-2) == 0, "heads");
    TORCH_CHECK(p >= 0 && p < 1 && scale > 0, "dropout or scale");
    call.lacks({"seqused_k", "alibi_slopes", "block_table", "num_splits"});
    const at::Tensor of_keys = call.tensor("cum_seq_k");
    TORCH_CHECK(of_keys.defined() == bounds.defined(), "cum_seq_q and cum_seq_k");
    if (!bounds.defined()) {
      TORCH_CHECK(queries == q.size(1) && keys == k.size(1), "max_q or max_k");
      return;
    }
    TORCH_CHECK(bounds.scalar_type() == at::kInt && bounds.is_contiguous() && bounds.dim() == 1 && bounds.numel() > 1 &&
                    of_keys.equal(bounds),
                "cum_seq_q");
    const at::Tensor lengths = bounds.diff();
    TORCH_CHECK(bounds[0].item<int>() == 0 && bounds[-1].item<int>() == q.size(0) && q.size(0) == k.size(0) &&
                    lengths.min().item<int>() > 0,
                "the documents are not those of the rows");
    TORCH_CHECK(lengths.max().item<int>() <= queries && queries == keys, "max_q or max_k");
  }

  int64_t count() const { return bounds.defined() ? bounds.numel() - 1 : 1; }
  // The part of document `d` of rows, as one sample: (1, positions, ...), or all samples.
  at::Tensor part(const at::Tensor& x, int64_t d, int64_t dim = 0) const {
    if (!bounds.defined()) return x;
    const int64_t begin = bounds[d].item<int>();
    return x.narrow(dim, begin, bounds[d + 1].item<int>() - begin).unsqueeze(0);
  }
  Form form(int64_t d, uint64_t seed) const {
    const at::Tensor of_q = part(q, d), of_k = part(k, d);
    const int64_t past = of_k.size(1) - of_q.size(1);  // the last query sees the last key
    Form form;
    form.scale = scale;
    const int64_t behind = causal ? 0 : right, all = of_k.size(1) + of_q.size(1);
    if (behind >= 0 || left >= 0) {
      form.hidden =
          hidden_keys(of_q.size(1), of_k.size(1), left < 0 ? all : left - past, behind < 0 ? all : behind + past);
    }
    if (p > 0) form.factors = fused_dropout(true, seed, p, {of_q.size(0), of_q.size(2), of_q.size(1), of_k.size(1)}, d);
    return form;
  }
  void note(Kernel kernel, uint64_t seed) const { last_call() = {kernel, seed, p, bounds, queries}; }

  at::Tensor q, k, v, bounds;
  bool causal;
  int64_t left, right, queries, keys;
  double p, scale;
};

void flash_forward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Call call(op, *stack);
  const Flash flash(call);
  TORCH_CHECK(!call.flag("return_debug_mask"), "return_debug_mask");
  const uint64_t seed = flash.p > 0 ? draw_seed() : 0;
  flash.note(Kernel::kFlash, seed);
  std::vector<at::Tensor> out, sums;
  for (int64_t d = 0; d < flash.count(); ++d) {
    const Sums of = attend(flash.part(flash.q, d), flash.part(flash.k, d), flash.part(flash.v, d), flash.form(d, seed));
    out.push_back(of.out);
    sums.push_back(of.log_sum_exp);
  }
  const bool documents = flash.bounds.defined();
  const at::Tensor all = documents ? at::cat(out, 1).squeeze(0) : out[0];
  const at::Tensor all_sums = documents ? at::cat(sums, 2).squeeze(0) : sums[0];
  const at::Tensor state = at::zeros({2}, at::kLong).view(at::kUInt64);
  torch::jit::push(*stack, all.to(flash.q.scalar_type()).contiguous(), all_sums.to(at::kFloat).contiguous(), state,
                   at::empty({}, at::kUInt64), at::empty({0}, flash.q.options()));
}

void flash_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Call call(op, *stack);
  const Flash flash(call);
  const at::Tensor dout = call.tensor("grad_out"), out = call.tensor("out");
  const at::Tensor sums = call.tensor("logsumexp"), state = call.tensor("rng_state");
  TORCH_CHECK(dout.sizes() == flash.q.sizes() && out.sizes() == flash.q.sizes() &&
                  dout.scalar_type() == flash.q.scalar_type() && out.scalar_type() == flash.q.scalar_type(),
              "grad_out or out");
  const std::vector<int64_t> rows = flash.bounds.defined()
                                        ? std::vector<int64_t>{flash.q.size(1), flash.q.size(0)}
                                        : std::vector<int64_t>{flash.q.size(0), flash.q.size(2), flash.q.size(1)};
  TORCH_CHECK(sums.sizes() == rows && sums.is_contiguous() && sums.scalar_type() == at::kFloat, "logsumexp");
  uint64_t seed = 0;
  if (flash.p > 0) {
    TORCH_CHECK(state.scalar_type() == at::kUInt64 && state.sizes() == at::IntArrayRef{2}, "rng_state");
    seed = state.const_data_ptr<uint64_t>()[0];
    TORCH_CHECK(state.const_data_ptr<uint64_t>()[1] == 0, "the offset of rng_state");
  }
  flash.note(Kernel::kFlashBackward, seed);
  std::vector<at::Tensor> dq, dk, dv;
  for (int64_t d = 0; d < flash.count(); ++d) {
    const Gradients of =
        attend_backward(flash.part(dout, d), flash.part(flash.q, d), flash.part(flash.k, d), flash.part(flash.v, d),
                        flash.part(out, d), flash.part(sums, d, flash.bounds.defined() ? 1 : 0), flash.form(d, seed));
    dq.push_back(of.q);
    dk.push_back(of.k);
    dv.push_back(of.v);
  }
  const auto all = [&](const std::vector<at::Tensor>& parts, const at::Tensor& of) {
    const at::Tensor one = flash.bounds.defined() ? at::cat(parts, 1).squeeze(0) : parts[0];
    return at::empty_like(of).copy_(one);
  };
  torch::jit::push(*stack, all(dq, flash.q), all(dk, flash.k), all(dv, flash.v));
}

// The memory-efficient kernels (attention.cu, attention_backward.cu, kernel_forward.h, kernel_backward.h).
struct Efficient {
  Efficient(const Call& call, bool backward)
      : q(call.tensor("query")),
        k(call.tensor("key")),
        v(call.tensor("value")),
        bias(call.tensor("bias")),
        mask(call.integer("custom_mask_type")),
        window(call.integer("window_size", 0)),
        p(call.number("dropout_p")) {
    check_heads(q, k, v, 4);
    TORCH_CHECK(q.scalar_type() == at::kFloat || q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16,
                "dtype");
    TORCH_CHECK(k.size(2) == q.size(2), "heads of keys");
    TORCH_CHECK(mask >= 0 && mask <= 2 && window >= 0 && (window == 0 || mask > 0), "mask or window");
    TORCH_CHECK(p >= 0 && p < 1, "dropout");
    call.lacks({"cu_seqlens_q", "cu_seqlens_k", "seqlen_k", "num_splits_key"});
    form.scale = scale_of(call, q);
    const int64_t queries = q.size(1), keys = k.size(1), all = queries + keys;
    const int64_t past = mask == 2 ? keys - queries : 0;
    // The backward kernels shift the window by nothing.
    const int64_t left = window == 0 ? all : window - 1 - (backward ? 0 : past);
    if (mask > 0) form.hidden = hidden_keys(queries, keys, left, past);
    if (!bias.defined()) return;
    TORCH_CHECK(bias.scalar_type() == q.scalar_type(), "invalid dtype for bias - should match query's dtype");
    TORCH_CHECK(bias.sizes() == at::IntArrayRef({q.size(0), q.size(2), queries, keys}), "attn_bias: ", bias.sizes());
    check_alignment(bias, "attn_bias");
    form.bias = bias.to(at::kDouble);
    // They multiply scores by log2(e), in float32.
    TORCH_CHECK(bias.to(at::kFloat).mul(1.45).isfinite().equal(bias.isfinite()), "attn_bias overflows");
    if (backward) TORCH_CHECK(!call.flag("bias_requires_grad"), "bias_requires_grad");
  }
  std::vector<int64_t> scores() const { return {q.size(0), q.size(2), q.size(1), k.size(1)}; }
  int64_t sums() const { return (q.size(1) + 31) / 32 * 32; }

  at::Tensor q, k, v, bias;
  int64_t mask, window;
  double p;
  Form form;
};

void efficient_forward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Call call(op, *stack);
  Efficient efficient(call, /*backward=*/false);
  TORCH_CHECK(call.flag("compute_log_sumexp"), "compute_log_sumexp");
  const uint64_t seed = efficient.p > 0 ? draw_seed() : 0;
  if (efficient.p > 0) efficient.form.factors = fused_dropout(false, seed, efficient.p, efficient.scores());
  last_call() = {Kernel::kEfficient, seed, efficient.p};
  const Sums of = attend(efficient.q, efficient.k, efficient.v, efficient.form);
  const at::Tensor sums = at::constant_pad_nd(of.log_sum_exp, {0, efficient.sums() - efficient.q.size(1)}, kInfinity);
  torch::jit::push(*stack, of.out.to(efficient.q.scalar_type()).contiguous(), sums.to(at::kFloat),
                   at::scalar_tensor(static_cast<int64_t>(seed), at::kLong), at::scalar_tensor(0, at::kLong),
                   efficient.q.size(1), efficient.k.size(1));
}

void efficient_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Call call(op, *stack);
  Efficient efficient(call, /*backward=*/true);
  const at::Tensor dout = call.tensor("grad_out_"), out = call.tensor("out");
  const at::Tensor sums = call.tensor("logsumexp");
  const at::ScalarType type = efficient.q.scalar_type();
  TORCH_CHECK(dout.sizes() == efficient.q.sizes() && dout.scalar_type() == type && out.sizes() == efficient.q.sizes() &&
                  out.scalar_type() == type && out.is_contiguous(),
              "grad_out or out");
  TORCH_CHECK(sums.sizes() == at::IntArrayRef({out.size(0), out.size(2), efficient.sums()}) && sums.is_contiguous() &&
                  sums.scalar_type() == at::kFloat,
              "logsumexp: ", sums.sizes());
  const int64_t queries = efficient.q.size(1);
  TORCH_CHECK(sums.slice(2, queries).eq(kInfinity).all().item<bool>(), "the rest of logsumexp");
  TORCH_CHECK(call.integer("max_seqlen_q") == queries && call.integer("max_seqlen_k") == efficient.k.size(1));
  uint64_t seed = 0;
  if (efficient.p > 0) {
    const at::Tensor first = call.tensor("philox_seed"), second = call.tensor("philox_offset");
    for (const at::Tensor& one : {first, second})
      TORCH_CHECK(one.scalar_type() == at::kLong && one.dim() == 0 && one.is_cpu(), "seed or offset");
    TORCH_CHECK(second.item<int64_t>() == 0, "the offset of dropout");
    seed = static_cast<uint64_t>(first.item<int64_t>());
    efficient.form.factors = fused_dropout(false, seed, efficient.p, efficient.scores());
  }
  last_call() = {Kernel::kEfficientBackward, seed, efficient.p};
  const Gradients of =
      attend_backward(dout, efficient.q, efficient.k, efficient.v, out, sums.narrow(2, 0, queries), efficient.form);
  const auto narrow = [&](const at::Tensor& x) { return x.to(type).contiguous(); };
  torch::jit::push(*stack, narrow(of.q), narrow(of.k), narrow(of.v), at::Tensor());
}

}  // namespace

FusedCall last_fused_call() {
  return std::exchange(last_call(), {});
}

at::Tensor fused_dropout(bool flash, uint64_t seed, double p, at::IntArrayRef scores, int64_t first) {
  const at::Tensor factors = at::empty(scores, at::kDouble);
  double* to = factors.mutable_data_ptr<double>();
  const double scale = 1 / (1 - p);
  const auto most = static_cast<uint64_t>(std::floor((1 - p) * 255));
  const auto part = static_cast<uint64_t>(p * 0x1p53);
  for (int64_t b = 0; b < scores[0]; ++b) {
    for (int64_t h = 0; h < scores[1]; ++h) {
      const uint64_t head = mix_bits(mix_bits(seed, static_cast<uint64_t>(first + b)), static_cast<uint64_t>(h));
      for (int64_t i = 0; i < scores[2]; ++i) {
        for (int64_t j = 0; j < scores[3]; ++j) {
          const uint64_t bits = mix_bits(head + static_cast<uint64_t>(i << 32 | j));
          *to++ = (flash ? (bits & 255) <= most : bits >> 11 > part) ? scale : 0;
        }
      }
    }
  }
  return factors;
}

TORCH_LIBRARY_IMPL(aten, CPU, library) {
  library.impl("_flash_attention_forward", torch::CppFunction::makeFromBoxedFunction<&flash_forward>());
  library.impl("_flash_attention_backward", torch::CppFunction::makeFromBoxedFunction<&flash_backward>());
  library.impl("_efficient_attention_forward", torch::CppFunction::makeFromBoxedFunction<&efficient_forward>());
  library.impl("_efficient_attention_backward", torch::CppFunction::makeFromBoxedFunction<&efficient_backward>());
}

}  // namespace twobp::test
