#include "twobp/nn/kernels/attention/packed_heads.h"

#include <vector>

namespace twobp {
namespace {

// `count` heads of rows from `column` on, (B, positions, count, D).
at::Tensor heads_of(const at::Tensor& rows, int64_t column, int64_t count, int64_t dim, bool interleaved) {
  return rows.narrow(2, column, rows.size(2) - column)
      .as_strided({rows.size(0), rows.size(1), count, dim},
                  {rows.stride(0), rows.stride(1), interleaved ? 3 * dim : dim, 1});
}

at::Tensor keys_of(const at::Tensor& packed, const PackedAttention& attention, bool value) {
  const int64_t count = attention.kv_heads, dim = attention.head_dim;
  const int64_t column = value ? attention.v_column(0) : attention.k_column(0);
  std::vector<at::Tensor> all;
  for (const EarlierKeys& earlier : attention.earlier) {
    all.push_back(earlier.packed ? heads_of(earlier.rows, column, count, dim, attention.interleaved)
                                 : heads_of(earlier.rows, value ? count * dim : 0, count, dim, /*interleaved=*/false));
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
  int64_t begin = 0;
  for (const EarlierKeys& earlier : attention.earlier) {
    const int64_t count = earlier.rows.size(1);
    const std::vector<at::Tensor> halves = earlier.gradient.chunk(2, 2);
    halves[0].add_(dk.narrow(1, begin, count).flatten(2));
    halves[1].add_(dv.narrow(1, begin, count).flatten(2));
    begin += count;
  }
  dk = dk.narrow(1, begin, dq.size(1));
  dv = dv.narrow(1, begin, dq.size(1));
  if (attention.from_later.defined()) {
    const std::vector<at::Tensor> later = attention.from_later.chunk(2, 2);
    dk = later[0].unflatten(2, {attention.kv_heads, attention.head_dim}) + dk;
    dv = later[1].unflatten(2, {attention.kv_heads, attention.head_dim}) + dv;
  }
  const auto write = [&](int64_t column, const at::Tensor& gradient) {
    heads_of(dpacked, column, gradient.size(2), attention.head_dim, attention.interleaved).copy_(gradient);
  };
  write(attention.q_column(0), dq);
  write(attention.k_column(0), dk);
  write(attention.v_column(0), dv);
}

}  // namespace twobp
