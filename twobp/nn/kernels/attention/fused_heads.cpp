#include "twobp/nn/kernels/attention/fused_heads.h"

#include <array>
#include <atomic>
#include <limits>
#include <mutex>
#include <vector>

#include <ATen/Context.h>

#include "twobp/core/check.h"
#include "twobp/core/random.h"
#include "twobp/nn/kernels/attention/packed_attention.h"

namespace twobp {
namespace {

using Causal = FusedHeads::Causal;
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // of q, k and v

std::atomic<bool> on_cpus{false};

// FlashAttention takes no bias, and counts causal keys from the last.
bool by_flash(at::ScalarType type, int64_t queries, int64_t keys, const FusedHeads& form) {
  return type != at::kFloat && !form.bias.defined() && (form.causal != Causal::kFromFirst || queries == keys);
}

bool by_flash(const at::Tensor& q, const at::Tensor& k, const FusedHeads& form) {
  return by_flash(q.scalar_type(), q.size(1), k.size(1), form);
}

// The kernels read 16 bytes at once.
constexpr int64_t kBytesAtOnce = 16;

// A tensor whose heads the kernels can read: itself, or a copy.
at::Tensor readable(const at::Tensor& heads) {
  const int64_t numbers = kBytesAtOnce / static_cast<int64_t>(heads.element_size());
  bool even = heads.stride(3) == 1 && reinterpret_cast<uintptr_t>(heads.const_data_ptr()) % kBytesAtOnce == 0;
  for (int64_t i = 0; i < 3; ++i) even = even && heads.stride(i) % numbers == 0;
  return even ? heads : heads.clone(at::MemoryFormat::Contiguous);
}

double probability(const DropoutMask& mask) {
  return mask.threshold / 65536.0;
}

// What the kernels' generator starts from, below 2^63: the memory-efficient kernels take a signed number.
uint64_t seed_of(const DropoutMask& mask) {
  const uint64_t key = mask.key[0] | static_cast<uint64_t>(mask.key[1]) << 32;
  return mix_bits(key, mask.micro_batch) >> 1;
}

// Held while a kernel draws from the device's generator, whichever kernel.
std::mutex& turn_of(at::Device device) {
  static std::array<std::mutex, 64> of_devices;
  return of_devices[static_cast<size_t>(device.index() + 1) % of_devices.size()];
}

// Calls `forward`, whose kernel draws from the device's generator, as if that had just been made with the mask's seed.
// Afterwards the generator is as it was. Ranks that share a GPU take turns. (`forward` itself locks the generator's
// mutex.)
template <typename Forward>
auto with_seed(const DropoutMask& mask, at::Device device, Forward&& forward) {
  if (mask.threshold == 0) return forward();
  const std::scoped_lock turn(turn_of(device));
  at::Generator generator = at::globalContext().defaultGenerator(device);
  struct Seeded {
    Seeded(at::Generator& generator, uint64_t seed) : generator(generator) {
      const std::scoped_lock lock(generator.mutex());
      state = generator.get_state();
      generator.set_current_seed(seed);
    }
    ~Seeded() {
      const std::scoped_lock lock(generator.mutex());
      generator.set_state(state);
    }
    at::Generator& generator;
    at::Tensor state;
  };
  const Seeded seeded(generator, seed_of(mask));
  return forward();
}

// FlashAttention's state of dropout, seed and offset, as its forward pass would give it.
at::Tensor flash_state(const DropoutMask& mask, const at::TensorOptions& options) {
  if (mask.threshold == 0) return at::empty({2}, options.dtype(at::kUInt64));  // is not read
  const at::Tensor state = at::zeros({2}, options.dtype(at::kLong));
  state.narrow(0, 0, 1).fill_(static_cast<int64_t>(seed_of(mask)));
  return state.view(at::kUInt64);
}

// The memory-efficient kernels read theirs on the host.
at::Tensor on_host(uint64_t number) {
  return at::scalar_tensor(static_cast<int64_t>(number), at::TensorOptions(at::kLong));
}

// What FlashAttention takes besides tensors.
struct FlashArguments {
  FlashArguments(const at::Tensor& q, const at::Tensor& k, const FusedHeads& form)
      : causal(form.causal != Causal::kNo), queries(q.size(1)), keys(k.size(1)) {
    if (causal && form.window > 0) {
      left = form.window - 1;
      right = 0;
    }
    if (form.documents == nullptr) return;
    bounds = form.documents->bounds;
    queries = keys = form.documents->longest;
  }
  // Documents lie one after another in one sample.
  at::Tensor rows(const at::Tensor& heads) const { return bounds ? heads.flatten(0, 1) : heads; }

  bool causal;
  int64_t queries, keys;
  std::optional<at::Tensor> bounds;
  std::optional<int64_t> left, right;  // keys that a query sees before and behind its own
};

// `alone`, which has a number for each row, in a shape that fits `heads`.
at::Tensor rows_alone(const at::Tensor& alone, const at::Tensor& heads) {
  return alone.view({heads.size(0), heads.size(1), 1, 1});
}

at::Tensor repeated(const at::Tensor& heads, int64_t group) {
  return group == 1 ? heads : heads.repeat_interleave(group, 2);
}

// The sum over the heads that share keys and values.
at::Tensor of_group(const at::Tensor& gradient, int64_t group) {
  return group == 1 ? gradient : gradient.unflatten(2, {gradient.size(2) / group, group}).sum(3);
}

std::tuple<at::Tensor, at::Tensor> flash_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                 const FusedHeads& form) {
  const FlashArguments with(q, k, form);
  const auto [y, sums, state, unused, mask] = with_seed(form.dropout, q.device(), [&] {
    return at::_flash_attention_forward(with.rows(q), with.rows(k), with.rows(v), with.bounds, with.bounds,
                                        with.queries, with.keys, probability(form.dropout), with.causal,
                                        /*return_debug_mask=*/false, form.scale, with.left, with.right);
  });
  if (!with.bounds) return {y.contiguous(), sums};
  TWOBP_CHECK(sums.dim() == 2 && sums.size(1) == q.size(0) * q.size(1),
              "LibTorch's FlashAttention of documents gives sums ", sums.sizes(), ", but twobp expects (", q.size(2),
              ", ", q.size(0) * q.size(1), "): use another version");
  at::Tensor out = y.contiguous().view(q.sizes());
  if (form.documents->alone.defined())
    out = at::where(rows_alone(form.documents->alone, out), repeated(v, q.size(2) / v.size(2)), out);
  return {out, sums.view({q.size(2), q.size(0), q.size(1)}).transpose(0, 1)};
}

Gradients flash_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const at::Tensor& out, const at::Tensor& log_sum_exp, const FusedHeads& form) {
  const FlashArguments with(q, k, form);
  const at::Tensor state = flash_state(form.dropout, q.options());
  const at::Tensor bounds = with.bounds.value_or(at::Tensor());
  at::Tensor alone;
  if (with.bounds && form.documents->alone.defined()) alone = rows_alone(form.documents->alone, q);
  const at::Tensor dy = alone.defined() ? dout.masked_fill(alone, 0) : dout;
  const at::Tensor sums =
      with.bounds ? log_sum_exp.transpose(0, 1).reshape({q.size(2), q.size(0) * q.size(1)}) : log_sum_exp.contiguous();
  auto [dq, dk, dv] = at::_flash_attention_backward(
      with.rows(dy), with.rows(q), with.rows(k), with.rows(v), with.rows(out), sums, bounds, bounds, with.queries,
      with.keys, probability(form.dropout), with.causal, state, state, form.scale, with.left, with.right);
  dq = dq.view(q.sizes());
  dk = dk.view(k.sizes());
  dv = dv.view(v.sizes());
  if (alone.defined()) dv = at::where(alone, of_group(dout, q.size(2) / v.size(2)), dv);
  return {dq, dk, dv};
}

// What the memory-efficient kernels take besides q. They know no groups, so that keys and values are repeated for
// theirs.
struct EfficientArguments {
  EfficientArguments(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const FusedHeads& form)
      : group(q.size(2) / k.size(2)),
        mask(static_cast<int64_t>(form.causal)),
        k(repeated(k, group)),
        v(repeated(v, group)) {
    if (form.bias.defined()) bias = form.bias;
    if (form.causal != Causal::kNo && form.window > 0) window = form.window;
  }
  int64_t group;
  int64_t mask;
  at::Tensor k, v;  // (B, L, H, D)
  std::optional<at::Tensor> bias;
  std::optional<int64_t> window;
};

// The kernels keep a row of sums for each head, whose length is a multiple of this.
constexpr int64_t kSumsAtOnce = 32;

std::tuple<at::Tensor, at::Tensor> efficient_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                     const FusedHeads& form) {
  const EfficientArguments with(q, k, v, form);
  const auto [y, sums, seed, offset, queries, keys] = with_seed(form.dropout, q.device(), [&] {
    return at::_efficient_attention_forward(q, with.k, with.v, with.bias, {}, {}, {}, {}, probability(form.dropout),
                                            with.mask, /*compute_log_sumexp=*/true, form.scale, /*seqlen_k=*/{},
                                            with.window);
  });
  return {y.contiguous(), sums.narrow(2, 0, q.size(1))};
}

Gradients efficient_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const at::Tensor& out, const at::Tensor& log_sum_exp, const FusedHeads& form) {
  const EfficientArguments with(q, k, v, form);
  const int64_t positions = q.size(1);
  const int64_t missing = (positions + kSumsAtOnce - 1) / kSumsAtOnce * kSumsAtOnce - positions;
  const at::Tensor sums =
      at::constant_pad_nd(log_sum_exp, {0, missing}, std::numeric_limits<double>::infinity()).contiguous();
  auto [dq, dk, dv, dbias] = at::_efficient_attention_backward(
      dout, q, with.k, with.v, with.bias, out, {}, {}, positions, with.k.size(1), sums, probability(form.dropout),
      on_host(seed_of(form.dropout)), on_host(0), with.mask,
      /*bias_requires_grad=*/false, form.scale, /*num_splits_key=*/{}, with.window);
  return {dq, of_group(dk, with.group), of_group(dv, with.group)};
}

// A bias of these sizes, whose rows begin at multiples of 16 numbers.
at::Tensor even_bias(std::vector<int64_t> sizes, const at::TensorOptions& options) {
  const int64_t keys = sizes.back();
  sizes.back() = (keys + 15) / 16 * 16;
  return at::zeros(sizes, options).narrow(static_cast<int64_t>(sizes.size()) - 1, 0, keys);
}

}  // namespace

bool fused_kernels_take(at::Device device, at::ScalarType type, int64_t dim) {
  return (device.is_cuda() || (device.is_cpu() && on_cpus)) &&
         (type == at::kFloat || type == at::kBFloat16 || type == at::kHalf) && dim % 8 == 0 && dim <= 256;
}

bool fused_kernels_compute(at::ScalarType type, int64_t batch, int64_t queries, int64_t heads, int64_t keys,
                           const FusedHeads& form) {
  if (form.scale && !(*form.scale > 0)) return false;
  if (by_flash(type, queries, keys, form)) return true;
  // The memory-efficient backward kernels count the window from the first key, but forward does from the last. With
  // dropout, forward counts the scores by 32 bits, but backward by 64.
  return form.documents == nullptr && (form.window == 0 || queries == keys) &&
         (form.dropout.threshold == 0 || batch * heads * queries * keys <= std::numeric_limits<int32_t>::max());
}

at::Tensor key_bias(const at::Tensor& shift, int64_t heads, int64_t queries, at::ScalarType type) {
  const int64_t batch = shift.size(0), keys = shift.size(1);
  const at::Tensor bias = even_bias({batch, 1, 1, keys}, shift.options().dtype(type));
  bias.copy_(shift.view({batch, 1, 1, keys}));
  return bias.expand({batch, heads, queries, keys});
}

at::Tensor score_bias(const at::Tensor& mask, at::IntArrayRef scores, at::ScalarType type) {
  at::Tensor of = mask;
  while (of.dim() < 4) of = of.unsqueeze(0);
  const at::Tensor bias = even_bias({of.size(0), of.size(1), of.size(2), scores[3]}, mask.options().dtype(type));
  of = of.expand(bias.sizes());
  // A hidden key is far below the lowest other one, so its probability is 0. Both are far above the lowest number,
  // because the kernels multiply scores by log2(e).
  const double lowest = type == at::kHalf ? -65504 : std::numeric_limits<float>::lowest();
  const double hidden = lowest / 2, shown = lowest / 4;
  if (mask.scalar_type() == at::kBool) {
    bias.masked_fill_(of.logical_not(), hidden);
  } else {
    bias.copy_(of.clamp_min(shown));
    bias.masked_fill_(of.eq(-std::numeric_limits<double>::infinity()), hidden);
  }
  return bias.expand(scores);
}

std::tuple<at::Tensor, at::Tensor> fused_heads_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                       const FusedHeads& form) {
  return (by_flash(q, k, form) ? flash_forward : efficient_forward)(readable(q), readable(k), readable(v), form);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> fused_heads_backward(const at::Tensor& dout, const at::Tensor& q,
                                                                    const at::Tensor& k, const at::Tensor& v,
                                                                    const at::Tensor& out,
                                                                    const at::Tensor& log_sum_exp,
                                                                    const FusedHeads& form) {
  return (by_flash(q, k, form) ? flash_backward : efficient_backward)(dout.contiguous(), readable(q), readable(k),
                                                                      readable(v), out.contiguous(), log_sum_exp, form);
}

FusedKernelsOnCpus::FusedKernelsOnCpus() {
  on_cpus = true;
}

FusedKernelsOnCpus::~FusedKernelsOnCpus() {
  on_cpus = false;
}

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
  if (attention.value_width() != attention.head_dim) return false;
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
