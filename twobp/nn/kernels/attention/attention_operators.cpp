// Attention by LibTorch's operators. It handles one block of queries at a time, so that only a block of scores is in
// memory. A causal block computes only with the keys that a window lets it see.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "twobp/nn/kernels/attention/packed_attention.h"
#include "twobp/nn/kernels/rows/operators.h"

namespace twobp {

namespace operators {
namespace {

constexpr int64_t kQueries = 128;

// Queries [first, first + count) and the keys [key, key + keys) that they may attend to. With slices, queries count
// from the slice's first, and keys from the first of all.
struct Block {
  int64_t first, count, key, keys;

  at::Tensor of_keys(const at::Tensor& tensor, int64_t dim) const { return tensor.narrow(dim, key, keys); }
};

template <typename Visit>
void for_blocks(int64_t positions, const PackedAttention& attention, Visit&& visit) {
  for (int64_t first = 0; first < positions; first += kQueries) {
    const int64_t count = std::min(kQueries, positions - first);
    const int64_t at = attention.past() + first;
    const int64_t key = attention.causal && attention.window > 0 ? std::max<int64_t>(0, at - attention.window + 1) : 0;
    visit(Block{first, count, key, (attention.causal ? at + count : positions) - key});
  }
}

// The first key that each query of the block sees, (B or 1, 1, count, 1). Undefined: key 0.
at::Tensor starts_of(const PackedAttention& attention, const Block& block, at::Device device) {
  if (!attention.causal || (attention.window == 0 && !attention.documents)) return {};
  const auto options = at::TensorOptions().dtype(at::kLong).device(device);
  at::Tensor starts = at::zeros({1, block.count}, options);
  if (attention.window > 0) {
    const int64_t first = attention.past() + block.first - attention.window + 1;
    starts = at::arange(first, first + block.count, options).clamp_min_(0).unsqueeze(0);
  }
  if (attention.documents) {
    const at::Tensor& of_documents = attention.documents->starts_on(device);
    starts = at::maximum(starts, of_documents.narrow(1, block.first, block.count));
  }
  return starts.unsqueeze(1).unsqueeze(3);
}

// q, k, v as (batch, heads, positions, dim). k and v are repeated for their group.
struct Heads {
  Heads(const at::Tensor& packed, const PackedAttention& attention)
      : scale(attention.scale > 0 ? attention.scale : 1 / std::sqrt(static_cast<double>(attention.head_dim))),
        group(attention.heads / attention.kv_heads) {
    const PackedHeads heads(packed, attention);
    q = heads.q.transpose(1, 2);
    k = heads.k.transpose(1, 2).repeat_interleave(group, 1);
    v = heads.v.transpose(1, 2).repeat_interleave(group, 1);
  }

  // scale q k^T, capped, + shift where a query sees a key, else -inf: (batch, heads, count, keys). `slope` becomes that
  // of the cap, if there is one.
  at::Tensor scores(const PackedAttention& attention, const Block& block, at::Tensor* slope = nullptr) const {
    constexpr double kHidden = -std::numeric_limits<double>::infinity();
    const at::Tensor keys = block.of_keys(k, 2).transpose(2, 3);
    at::Tensor scores = at::matmul(q.narrow(2, block.first, block.count), keys).mul_(scale);
    if (attention.cap > 0) {
      const at::Tensor of_cap = soft_cap(scores, attention.cap);
      if (slope != nullptr) *slope = of_cap;
    }
    if (attention.shift.defined()) scores.add_(block.of_keys(attention.shift, 1).unsqueeze(1).unsqueeze(1));
    if (attention.causal) {
      const at::Tensor later = at::ones({block.count, block.keys}, q.options().dtype(at::kBool))
                                   .triu_(attention.past() + block.first - block.key + 1);
      scores.masked_fill_(later, kHidden);
    }
    if (const at::Tensor starts = starts_of(attention, block, q.device()); starts.defined()) {
      const at::Tensor numbers = at::arange(block.key, block.key + block.keys, q.options().dtype(at::kLong));
      scores.masked_fill_(numbers < starts, kHidden);
    }
    return scores;
  }

  double scale;
  int64_t group;
  at::Tensor q, k, v;
};

// The dropout factor, 0 or the scale, of each probability of the block. Undefined without dropout.
at::Tensor factors_of(const at::Tensor& p, const PackedAttention& attention, int64_t positions, const Block& block) {
  const DropoutMask& mask = attention.dropout;
  if (mask.threshold == 0) return {};
  const auto integers = p.options().dtype(at::kLong);
  const at::Tensor of_head = at::arange(p.size(0) * p.size(1), integers).unsqueeze(1) * positions;
  const at::Tensor rows = of_head + at::arange(block.first, block.first + block.count, integers);
  const int64_t cols = mask.length > 0 ? int64_t{mask.positions} : positions;
  const at::Tensor factors = dropout_factors(mask, rows.flatten(), cols, p.options());
  const at::Tensor starts = starts_of(attention, block, p.device());
  if (!starts.defined()) return factors.narrow(1, 0, block.keys).reshape(p.sizes());
  const at::Tensor columns = at::arange(block.key, block.key + block.keys, integers) - starts;
  return factors.view({p.size(0), p.size(1), p.size(2), cols}).gather(3, columns.clamp_min(0).expand(p.sizes()));
}

}  // namespace

void attention_forward(const at::Tensor& packed, const PackedAttention& attention, at::Tensor& out,
                       at::Tensor& log_sum_exp) {
  const Heads heads(packed, attention);
  const int64_t positions = packed.size(1);
  for_blocks(positions, attention, [&](const Block& block) {
    at::Tensor p = heads.scores(attention, block);
    const at::Tensor sum = p.logsumexp(3);
    log_sum_exp.narrow(2, block.first, block.count).copy_(sum);
    p.sub_(sum.unsqueeze(3)).exp_();
    const at::Tensor factors = factors_of(p, attention, positions, block);
    if (factors.defined()) p.mul_(factors);
    const at::Tensor rows = at::matmul(p, block.of_keys(heads.v, 2)).transpose(1, 2).flatten(2);
    out.narrow(1, block.first, block.count).copy_(rows);
  });
}

void attention_backward(const at::Tensor& packed, const PackedAttention& attention, const at::Tensor& out,
                        const at::Tensor& log_sum_exp, const at::Tensor& dout, at::Tensor& dpacked) {
  const Heads heads(packed, attention);
  const int64_t positions = packed.size(1);
  const auto by_head = [&](const at::Tensor& tensor) {
    return tensor.unflatten(2, {attention.heads, attention.value_width()}).transpose(1, 2);
  };
  // Sums over the heads that share a key-value head.
  const auto of_group = [&](const at::Tensor& tensor) {
    return tensor.unflatten(1, {attention.kv_heads, heads.group}).sum(2);
  };
  const int64_t past = attention.past();
  const auto sums = [&](int64_t count, int64_t rows, int64_t dim) {
    return at::zeros({packed.size(0), count, rows, dim}, packed.options().dtype(compute_type(packed.scalar_type())));
  };
  const at::Tensor dq = sums(attention.heads, positions, attention.head_dim);
  const at::Tensor dk = sums(attention.kv_heads, past + positions, attention.head_dim);
  const at::Tensor dv = sums(attention.kv_heads, past + positions, attention.value_width());
  const at::Tensor gradient = by_head(dout);
  const at::Tensor inner = (gradient * by_head(out)).sum(3, true);
  for_blocks(positions, attention, [&](const Block& block) {
    const auto queries = [&](const at::Tensor& tensor) { return tensor.narrow(2, block.first, block.count); };
    const at::Tensor dy = queries(gradient);
    const at::Tensor k = block.of_keys(heads.k, 2);
    const at::Tensor v = block.of_keys(heads.v, 2);
    at::Tensor slope;
    const at::Tensor p = heads.scores(attention, block, &slope).sub_(queries(log_sum_exp).unsqueeze(3)).exp_();
    const at::Tensor factors = factors_of(p, attention, positions, block);
    at::Tensor dp = at::matmul(dy, v.transpose(2, 3));
    if (factors.defined()) dp.mul_(factors);
    const at::Tensor ds = dp.sub_(queries(inner)).mul_(p).mul_(heads.scale);
    if (slope.defined()) ds.mul_(slope);
    const at::Tensor dropped = factors.defined() ? p * factors : p;
    queries(dq).copy_(at::matmul(ds, k));
    block.of_keys(dk, 2).add_(of_group(at::matmul(ds.transpose(2, 3), queries(heads.q))));
    block.of_keys(dv, 2).add_(of_group(at::matmul(dropped.transpose(2, 3), dy)));
  });
  give_gradients(attention, dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), dpacked);
}

}  // namespace operators

namespace {

// `count` heads of rows from `column` on, (B, positions, count, D).
at::Tensor heads_of(const at::Tensor& rows, int64_t column, int64_t count, int64_t dim, bool interleaved) {
  return rows.narrow(2, column, rows.size(2) - column)
      .as_strided({rows.size(0), rows.size(1), count, dim},
                  {rows.stride(0), rows.stride(1), interleaved ? 3 * dim : dim, 1});
}

at::Tensor keys_of(const at::Tensor& packed, const PackedAttention& attention, bool value) {
  const int64_t count = attention.kv_heads, dim = value ? attention.value_width() : attention.head_dim;
  const int64_t column = value ? attention.v_column(0) : attention.k_column(0);
  const int64_t column_alone = value ? count * attention.head_dim : 0;
  std::vector<at::Tensor> all;
  for (const EarlierKeys& earlier : attention.earlier) {
    all.push_back(earlier.packed ? heads_of(earlier.rows, column, count, dim, attention.interleaved)
                                 : heads_of(earlier.rows, column_alone, count, dim, /*interleaved=*/false));
  }
  all.push_back(heads_of(packed, column, count, dim, attention.interleaved));
  return all.size() == 1 ? all[0] : at::cat(all, 1);
}

}  // namespace

PackedHeads::PackedHeads(const at::Tensor& packed, const PackedAttention& attention)
    : q(heads_of(packed, attention.q_column(0), attention.heads, attention.head_dim, attention.interleaved)),
      k(keys_of(packed, attention, /*value=*/false)),
      v(keys_of(packed, attention, /*value=*/true)) {}

void give_gradients(const PackedAttention& attention, const at::Tensor& dq, at::Tensor dk, at::Tensor dv,
                    at::Tensor& dpacked) {
  const int64_t keys = attention.kv_heads * attention.head_dim;
  const auto parts_of = [&](const at::Tensor& both) { return both.split({keys, both.size(2) - keys}, 2); };
  int64_t begin = 0;
  for (const EarlierKeys& earlier : attention.earlier) {
    const int64_t count = earlier.rows.size(1);
    const std::vector<at::Tensor> parts = parts_of(earlier.gradient);
    parts[0].add_(dk.narrow(1, begin, count).flatten(2));
    parts[1].add_(dv.narrow(1, begin, count).flatten(2));
    begin += count;
  }
  dk = dk.narrow(1, begin, dq.size(1));
  dv = dv.narrow(1, begin, dq.size(1));
  if (attention.from_later.defined()) {
    const std::vector<at::Tensor> later = parts_of(attention.from_later);
    dk = later[0].view(dk.sizes()) + dk;
    dv = later[1].view(dv.sizes()) + dv;
  }
  const auto write = [&](int64_t column, const at::Tensor& gradient) {
    heads_of(dpacked, column, gradient.size(2), gradient.size(3), attention.interleaved).copy_(gradient);
  };
  write(attention.q_column(0), dq);
  write(attention.k_column(0), dk);
  write(attention.v_column(0), dv);
}

}  // namespace twobp
