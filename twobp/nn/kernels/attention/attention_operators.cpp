// Attention by LibTorch's operators. It handles one block of queries at a time, so that only a block of
// scores is in memory. A causal block computes only with the keys that it can see.
#include <algorithm>
#include <cmath>
#include <limits>

#include "twobp/nn/kernels/operators.h"

namespace twobp::operators {
namespace {

constexpr int64_t kQueries = 128;

// Queries [first, first + count) and the keys [0, keys) that they attend to.
struct Block {
  int64_t first, count, keys;
};

template <typename Visit>
void for_blocks(int64_t positions, bool causal, Visit&& visit) {
  for (int64_t first = 0; first < positions; first += kQueries) {
    const int64_t count = std::min(kQueries, positions - first);
    visit(Block{first, count, causal ? first + count : positions});
  }
}

// Splits (batch, positions, packed) into q, k, v as (batch, heads, positions, dim). k and v are repeated for
// their group.
struct Heads {
  Heads(const at::Tensor& packed, const PackedAttention& attention)
      : scale(1 / std::sqrt(static_cast<double>(attention.head_dim))),
        group(attention.heads / attention.kv_heads) {
    const int64_t dim = attention.head_dim;
    const auto part = [&](int64_t first, int64_t count) {
      return packed.narrow(2, first * dim, count * dim).unflatten(2, {count, dim}).transpose(1, 2);
    };
    q = part(0, attention.heads);
    k = part(attention.heads, attention.kv_heads).repeat_interleave(group, 1);
    v = part(attention.heads + attention.kv_heads, attention.kv_heads).repeat_interleave(group, 1);
  }

  // scale q k^T + shift where a query sees a key, else -inf: (batch, heads, count, keys)
  at::Tensor scores(const PackedAttention& attention, const Block& block) const {
    const at::Tensor keys = k.narrow(2, 0, block.keys).transpose(2, 3);
    at::Tensor scores = at::matmul(q.narrow(2, block.first, block.count), keys).mul_(scale);
    if (attention.shift.defined())
      scores.add_(attention.shift.narrow(1, 0, block.keys).unsqueeze(1).unsqueeze(1));
    if (attention.causal) {
      const at::Tensor hidden =
          at::ones({block.count, block.keys}, q.options().dtype(at::kBool)).triu_(block.first + 1);
      scores.masked_fill_(hidden, -std::numeric_limits<double>::infinity());
    }
    return scores;
  }

  double scale;
  int64_t group;
  at::Tensor q, k, v;
};

// The dropout factor, 0 or the scale, of each probability of the block. Undefined without dropout.
at::Tensor factors_of(const at::Tensor& p, const DropoutMask& mask, int64_t positions, const Block& block) {
  if (mask.threshold == 0) return {};
  const auto integers = p.options().dtype(at::kLong);
  const at::Tensor of_head = at::arange(p.size(0) * p.size(1), integers).unsqueeze(1) * positions;
  const at::Tensor rows = of_head + at::arange(block.first, block.first + block.count, integers);
  return dropout_factors(mask, rows.flatten(), positions, p.options())
      .narrow(1, 0, block.keys)
      .reshape(p.sizes());
}

}  // namespace

void attention_forward(const at::Tensor& packed, const PackedAttention& attention, at::Tensor& out,
                       at::Tensor& log_sum_exp) {
  const Heads heads(packed, attention);
  const int64_t positions = packed.size(1);
  for_blocks(positions, attention.causal, [&](const Block& block) {
    at::Tensor p = heads.scores(attention, block);
    const at::Tensor sum = p.logsumexp(3);
    log_sum_exp.narrow(2, block.first, block.count).copy_(sum);
    p.sub_(sum.unsqueeze(3)).exp_();
    const at::Tensor factors = factors_of(p, attention.dropout, positions, block);
    if (factors.defined()) p.mul_(factors);
    const at::Tensor rows = at::matmul(p, heads.v.narrow(2, 0, block.keys)).transpose(1, 2).flatten(2);
    out.narrow(1, block.first, block.count).copy_(rows);
  });
}

void attention_backward(const at::Tensor& packed, const PackedAttention& attention, const at::Tensor& out,
                        const at::Tensor& log_sum_exp, const at::Tensor& dout, at::Tensor& dpacked) {
  const Heads heads(packed, attention);
  const int64_t positions = packed.size(1);
  const auto by_head = [&](const at::Tensor& tensor) {
    return tensor.unflatten(2, {attention.heads, attention.head_dim}).transpose(1, 2);
  };
  // Sums over the heads that share a key-value head.
  const auto of_group = [&](const at::Tensor& tensor) {
    return tensor.unflatten(1, {attention.kv_heads, heads.group}).sum(2);
  };
  const auto sums = [&](int64_t count) {
    return at::zeros({packed.size(0), count, positions, attention.head_dim},
                     packed.options().dtype(compute_type(packed.scalar_type())));
  };
  const at::Tensor dq = sums(attention.heads);
  const at::Tensor dk = sums(attention.kv_heads);
  const at::Tensor dv = sums(attention.kv_heads);
  const at::Tensor gradient = by_head(dout);
  const at::Tensor inner = (gradient * by_head(out)).sum(3, true);
  for_blocks(positions, attention.causal, [&](const Block& block) {
    const auto queries = [&](const at::Tensor& tensor) { return tensor.narrow(2, block.first, block.count); };
    const at::Tensor dy = queries(gradient);
    const at::Tensor k = heads.k.narrow(2, 0, block.keys);
    const at::Tensor v = heads.v.narrow(2, 0, block.keys);
    const at::Tensor p = heads.scores(attention, block).sub_(queries(log_sum_exp).unsqueeze(3)).exp_();
    const at::Tensor factors = factors_of(p, attention.dropout, positions, block);
    at::Tensor dp = at::matmul(dy, v.transpose(2, 3));
    if (factors.defined()) dp.mul_(factors);
    const at::Tensor ds = dp.sub_(queries(inner)).mul_(p).mul_(heads.scale);
    const at::Tensor dropped = factors.defined() ? p * factors : p;
    queries(dq).copy_(at::matmul(ds, k));
    dk.narrow(2, 0, block.keys).add_(of_group(at::matmul(ds.transpose(2, 3), queries(heads.q))));
    dv.narrow(2, 0, block.keys).add_(of_group(at::matmul(dropped.transpose(2, 3), dy)));
  });
  const auto as_rows = [](const at::Tensor& tensor) { return tensor.transpose(1, 2).flatten(2); };
  dpacked.copy_(at::cat({as_rows(dq), as_rows(dk), as_rows(dv)}, 2));
}

}  // namespace twobp::operators
