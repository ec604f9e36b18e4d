#include "twobp/graph/apart_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <ATen/ExpandUtils.h>

#include "twobp/core/check.h"
#include "twobp/nn/kernels/attention/fused_heads.h"
#include "twobp/nn/kernels/attention/packed_attention.h"
#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/kernels/rows/operators.h"

namespace twobp::graph {
namespace {

constexpr int64_t kQueriesAtOnce = 128;  // so that only a block of scores is in memory
constexpr double kUnseen = -std::numeric_limits<double>::infinity();

void check_apart(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const ApartAttention& attention) {
  TWOBP_CHECK(q.dim() == 4 && k.dim() == 4 && q.is_floating_point() && q.numel() > 0 && k.numel() > 0 &&
                  v.sizes() == k.sizes() && k.size(0) == q.size(0) && q.size(1) % k.size(1) == 0 &&
                  k.size(3) == q.size(3) && k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(),
              "attention takes q (batch, heads, queries, n) and k, v (batch, kv_heads, keys, n) of one dtype, "
              "not ",
              q.sizes(), ", ", k.sizes(), " and ", v.sizes());
  const std::vector<int64_t> scores{q.size(0), q.size(1), q.size(2), k.size(2)};
  TWOBP_CHECK(!attention.mask.defined() || at::is_expandable_to(attention.mask.sizes(), scores),
              "attention has scores ", at::IntArrayRef(scores), ", but a mask ", attention.mask.sizes());
  TWOBP_CHECK(!attention.scale || std::isfinite(*attention.scale), "attention scales its scores by ",
              attention.scale.value_or(0));
}

// How the kernels for GPUs compute it. None: they do not.
std::optional<FusedHeads> fused_form(const at::Tensor& q, const at::Tensor& k, const ApartAttention& attention) {
  const at::ScalarType type = q.scalar_type();
  if (!fused_kernels_take(q.device(), type, q.size(3))) return std::nullopt;
  const at::Tensor& mask = attention.mask;
  // A wider mask would be rounded.
  if (mask.defined() && mask.scalar_type() != at::kBool && mask.scalar_type() != type) return std::nullopt;
  FusedHeads form;
  if (attention.causal) form.causal = FusedHeads::Causal::kFromFirst;
  form.scale = attention.scale;
  form.bias = mask;
  if (!fused_kernels_compute(type, q.size(0), q.size(2), q.size(1), k.size(2), form)) return std::nullopt;
  if (mask.defined()) form.bias = score_bias(mask, {q.size(0), q.size(1), q.size(2), k.size(2)}, type);
  return form;
}

// The queries that see no key, (batch or 1, heads or 1, queries or 1, 1), of bool.
at::Tensor blind_queries(const ApartAttention& attention, int64_t queries, int64_t keys) {
  at::Tensor seen = attention.mask;
  if (seen.scalar_type() != at::kBool) seen = seen.ne(kUnseen);
  while (seen.dim() < 4) seen = seen.unsqueeze(0);
  seen = seen.expand({seen.size(0), seen.size(1), seen.size(2), keys});
  if (!attention.causal) return seen.any(3, /*keepdim=*/true).logical_not_();
  if (seen.size(2) > 1) return seen.tril().any(3, /*keepdim=*/true).logical_not_();
  // The same keys for all queries: whether a key up to the query's own is seen.
  const at::Tensor last = at::arange(queries, seen.options().dtype(at::kLong)).clamp_max_(keys - 1);
  return seen.cumsum(3).index_select(3, last).eq(0).transpose(2, 3);
}

at::Tensor positions_first(const at::Tensor& heads) {
  return heads.transpose(1, 2);
}

// Without a mask, the kernels of packed rows compute it.
bool are_packed(const at::Tensor& q, const at::Tensor& k, const ApartAttention& attention) {
  return !attention.mask.defined() && q.size(2) == k.size(2) && attention.scale.value_or(1) > 0;
}

PackedAttention packed_form(const at::Tensor& q, const at::Tensor& k, const ApartAttention& attention) {
  PackedAttention packed;
  packed.heads = q.size(1);
  packed.kv_heads = k.size(1);
  packed.head_dim = q.size(3);
  packed.causal = attention.causal;
  packed.scale = attention.scale.value_or(0);
  return packed;
}

at::Tensor rows_of(const at::Tensor& heads, at::ScalarType type) {
  return heads.transpose(1, 2).flatten(2).to(type).contiguous();
}

// Rows (q | k | v), in the dtype in which attention takes them.
at::Tensor packed_rows(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const PackedAttention& packed) {
  const at::Tensor rows = at::cat({q, k, v}, 1);
  return rows_of(rows, attention_type(rows, packed));
}

// In the dtype of sums, with keys and values for each head.
struct WideHeads {
  WideHeads(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const ApartAttention& attention)
      : scale(attention.scale.value_or(1 / std::sqrt(static_cast<double>(q.size(3))))),
        group(q.size(1) / k.size(1)),
        q(operators::wide(q)),
        k(operators::wide(k).repeat_interleave(group, 1)),
        v(operators::wide(v).repeat_interleave(group, 1)) {}

  // Of the queries [first, first + count), (batch, heads, count, keys).
  at::Tensor scores(const ApartAttention& attention, int64_t first, int64_t count) const {
    at::Tensor scores = at::matmul(q.narrow(2, first, count), k.transpose(2, 3)).mul_(scale);
    if (attention.mask.defined()) {
      const std::vector<int64_t> all{q.size(0), q.size(1), q.size(2), k.size(2)};
      const at::Tensor mask = attention.mask.expand(all).narrow(2, first, count);
      if (mask.scalar_type() == at::kBool) {
        scores.masked_fill_(mask.logical_not(), kUnseen);
      } else {
        scores.add_(mask);
      }
    }
    if (attention.causal) {
      const at::Tensor later = at::ones({count, k.size(2)}, q.options().dtype(at::kBool)).triu_(first + 1);
      scores.masked_fill_(later, kUnseen);
    }
    return scores;
  }

  template <typename Visit>
  void for_blocks(Visit&& visit) const {
    for (int64_t first = 0; first < q.size(2); first += kQueriesAtOnce)
      visit(first, std::min(kQueriesAtOnce, q.size(2) - first));
  }

  double scale;
  int64_t group;
  at::Tensor q, k, v;
};

// exp(scores - log_sum_exp), and 0 for a query that sees no key, whose log_sum_exp is -inf.
at::Tensor probabilities(at::Tensor scores, const at::Tensor& log_sum_exp) {
  return scores.sub_(log_sum_exp.masked_fill(log_sum_exp.eq(kUnseen), 0).unsqueeze(3)).exp_();
}

// Laid out as ATen's kernel does: each position's heads lie side by side.
at::Tensor empty_heads(const at::Tensor& like) {
  return at::empty({like.size(0), like.size(2), like.size(1), like.size(3)}, like.options()).transpose(1, 2);
}

}  // namespace

bool attends_apart(const at::Tensor& q) {
  return by_operators(q);
}

std::pair<at::Tensor, at::Tensor> apart_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                  const ApartAttention& attention) {
  check_apart(q, k, v, attention);
  if (const std::optional<FusedHeads> form = fused_form(q, k, attention)) {
    auto [y, sums] = fused_heads_forward(positions_first(q), positions_first(k), positions_first(v), *form);
    at::Tensor out = y.transpose(1, 2);
    if (attention.mask.defined()) out.masked_fill_(blind_queries(attention, q.size(2), k.size(2)), 0);
    return {std::move(out), std::move(sums)};
  }
  const auto wide = q.options().dtype(compute_type(q.scalar_type()));
  at::Tensor log_sum_exp = at::empty({q.size(0), q.size(1), q.size(2)}, wide);
  if (are_packed(q, k, attention)) {
    const PackedAttention form = packed_form(q, k, attention);
    const at::Tensor packed = packed_rows(q, k, v, form);
    at::Tensor out = at::empty({q.size(0), q.size(2), q.size(1) * q.size(3)}, packed.options());
    packed_attention_forward(packed, form, out, log_sum_exp);
    return {out.to(q.scalar_type()).unflatten(2, {q.size(1), q.size(3)}).transpose(1, 2), log_sum_exp};
  }
  const WideHeads heads(q, k, v, attention);
  at::Tensor out = empty_heads(q);
  heads.for_blocks([&](int64_t first, int64_t count) {
    at::Tensor scores = heads.scores(attention, first, count);
    const at::Tensor sum = scores.logsumexp(3);
    log_sum_exp.narrow(2, first, count).copy_(sum);
    out.narrow(2, first, count).copy_(at::matmul(probabilities(std::move(scores), sum), heads.v));
  });
  return {out, log_sum_exp};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> apart_attention_backward(const at::Tensor& dout, const at::Tensor& q,
                                                                        const at::Tensor& k, const at::Tensor& v,
                                                                        const at::Tensor& out,
                                                                        const at::Tensor& log_sum_exp,
                                                                        const ApartAttention& attention) {
  check_apart(q, k, v, attention);
  TWOBP_CHECK(dout.sizes() == q.sizes() && out.sizes() == q.sizes() && log_sum_exp.sizes() == q.sizes().slice(0, 3) &&
                  dout.scalar_type() == q.scalar_type() && out.scalar_type() == q.scalar_type() &&
                  log_sum_exp.scalar_type() == compute_type(q.scalar_type()),
              "the derivative of attention takes what attention took and gave, and a gradient of its result");
  if (const std::optional<FusedHeads> form = fused_form(q, k, attention)) {
    at::Tensor dy = dout;
    if (attention.mask.defined()) dy = dy.masked_fill(blind_queries(attention, q.size(2), k.size(2)), 0);
    auto [dq, dk, dv] = fused_heads_backward(positions_first(dy), positions_first(q), positions_first(k),
                                             positions_first(v), positions_first(out), log_sum_exp, *form);
    // FlashAttention gives them the strides of q, k and v.
    const auto heads_first = [](const at::Tensor& x) { return x.contiguous().transpose(1, 2); };
    return {heads_first(dq), heads_first(dk), heads_first(dv)};
  }
  if (are_packed(q, k, attention)) {
    const PackedAttention form = packed_form(q, k, attention);
    at::Tensor packed = packed_rows(q, k, v, form);
    const at::ScalarType type = packed.scalar_type();
    packed_attention_backward(packed, form, rows_of(out, type), log_sum_exp.contiguous(), rows_of(dout, type), packed);
    const at::Tensor heads =
        packed.to(q.scalar_type()).unflatten(2, {form.heads + 2 * form.kv_heads, form.head_dim}).transpose(1, 2);
    return {heads.narrow(1, 0, form.heads), heads.narrow(1, form.heads, form.kv_heads),
            heads.narrow(1, form.heads + form.kv_heads, form.kv_heads)};
  }
  const WideHeads heads(q, k, v, attention);
  const at::Tensor gradient = operators::wide(dout);
  const at::Tensor inner = (gradient * out).sum(3, true);
  const at::Tensor dk = at::zeros_like(heads.k);
  const at::Tensor dv = at::zeros_like(heads.v);
  at::Tensor dq = empty_heads(q);
  heads.for_blocks([&](int64_t first, int64_t count) {
    const auto queries = [&](const at::Tensor& tensor) { return tensor.narrow(2, first, count); };
    const at::Tensor p = probabilities(heads.scores(attention, first, count), queries(log_sum_exp));
    const at::Tensor dy = queries(gradient);
    const at::Tensor ds = at::matmul(dy, heads.v.transpose(2, 3)).sub_(queries(inner)).mul_(p).mul_(heads.scale);
    queries(dq).copy_(at::matmul(ds, heads.k));
    dk.add_(at::matmul(ds.transpose(2, 3), queries(heads.q)));
    dv.add_(at::matmul(p.transpose(2, 3), dy));
  });
  // Sums over the heads that share keys and values.
  const auto of_group = [&](const at::Tensor& tensor) {
    return tensor.unflatten(1, {k.size(1), heads.group}).sum(2).to(q.scalar_type());
  };
  return {dq, of_group(dk), of_group(dv)};
}

}  // namespace twobp::graph
