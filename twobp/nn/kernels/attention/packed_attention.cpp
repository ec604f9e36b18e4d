#include "twobp/nn/kernels/attention/packed_attention.h"

#include <algorithm>
#include <cmath>

#include "twobp/nn/kernels/operators.h"
#include "twobp/nn/kernels/products/blas.h"
#include "twobp/nn/kernels/products/padded_rows.h"
#include "twobp/nn/kernels/products/rows.h"

namespace twobp {
namespace {

// Queries in a block. Causal blocks are smaller, because a block computes with keys that its first queries do
// not see.
constexpr int64_t kBlock = 128;
constexpr int64_t kCausalBlock = 64;

// State that the loops over samples, heads and blocks of queries share.
template <typename T>
struct Loops {
  Loops(const at::Tensor& packed, const PackedAttention& attention)
      : attention(attention),
        batch(packed.size(0)),
        positions(packed.size(1)),
        heads(attention.heads),
        kv_heads(attention.kv_heads),
        dim(attention.head_dim),
        stride(row_stride(packed)),
        out_stride(heads * dim),
        block(attention.causal ? kCausalBlock : kBlock),
        shift(attention.shift.defined() ? numbers<T>(attention.shift) : nullptr) {}

  int64_t tasks() const { return batch * kv_heads; }
  int64_t k_column(int64_t kv) const { return (heads + kv) * dim; }
  int64_t v_column(int64_t kv) const { return (heads + kv_heads + kv) * dim; }
  // The row in log_sum_exp and in dropout's mask.
  int64_t row(int64_t b, int64_t h, int64_t query) const { return (b * heads + h) * positions + query; }
  int64_t at_out(int64_t b, int64_t h, int64_t query) const {
    return (b * positions + query) * out_stride + h * dim;
  }

  // Calls body(h, query, scores) for the query heads of a key-value head, block by block. `query` is the
  // block's first query, and scores.cols is its number of keys.
  template <typename Body>
  void for_blocks(int64_t b, int64_t kv, Body&& body) const {
    const int64_t group = heads / kv_heads;
    for (int64_t h = kv * group; h < (kv + 1) * group; ++h) {
      for (int64_t query = 0; query < positions; query += block) {
        ScoreBlock<T> scores;
        scores.rows = std::min(block, positions - query);
        scores.cols = attention.causal ? query + scores.rows : positions;
        scores.seen = attention.causal ? query + 1 : positions;
        scores.scale = T(1) / std::sqrt(T(dim));
        scores.shift = shift == nullptr ? nullptr : shift + b * positions;
        scores.dropout = attention.dropout;
        scores.row_begin = row(b, h, query);
        body(h, query, scores);
      }
    }
  }

  const PackedAttention& attention;
  int64_t batch, positions, heads, kv_heads, dim, stride, out_stride, block;
  const T* shift;
};

// Memory of each thread. It is allocated on the rank's thread, so that the memory meter counts it.
template <typename T>
class Scratch {
 public:
  Scratch(int64_t count, const at::TensorOptions& options)
      : all_(at::empty({at::get_num_threads(), (count + kAligned - 1) / kAligned * kAligned}, options)) {}
  T* mine() const { return mutable_numbers<T>(all_) + at::get_thread_num() * all_.size(1); }

 private:
  static constexpr int64_t kAligned = 16;  // in numbers; aligns every thread's memory like that of the first
  at::Tensor all_;
};

template <typename T>
void forward(const at::Tensor& packed, const PackedAttention& attention, at::Tensor& out,
             at::Tensor& log_sum_exp) {
  const Loops<T> loops(packed, attention);
  const int64_t dim = loops.dim, stride = loops.stride;
  const Scratch<T> scratch(loops.block * loops.positions, packed.options());
  at::parallel_for(0, loops.tasks(), 1, [&](int64_t begin, int64_t end) {
    T* const p = scratch.mine();
    for (int64_t task = begin; task < end; ++task) {
      const int64_t b = task / loops.kv_heads, kv = task % loops.kv_heads;
      const T* const rows = numbers<T>(packed) + b * loops.positions * stride;
      const Matrix<const T> k{rows + loops.k_column(kv), stride};
      const Matrix<const T> v{rows + loops.v_column(kv), stride};
      loops.for_blocks(b, kv, [&](int64_t h, int64_t query, const ScoreBlock<T>& scores) {
        const Matrix<const T> q{rows + query * stride + h * dim, stride};
        const Matrix<T> y{mutable_numbers<T>(out) + loops.at_out(b, h, query), loops.out_stride};
        gemm<T>(false, true, scores.rows, scores.cols, dim, 1, q, k, 0, {p, scores.cols});
        kernels<T>().softmax_forward(scores, p, mutable_numbers<T>(log_sum_exp) + loops.row(b, h, query));
        gemm<T>(false, false, scores.rows, dim, scores.cols, 1, {p, scores.cols}, v, 0, y);
      });
    }
  });
}

template <typename T>
void backward(const at::Tensor& packed, const PackedAttention& attention, const at::Tensor& out,
              const at::Tensor& log_sum_exp, const at::Tensor& dout, at::Tensor& dpacked) {
  const Loops<T> loops(packed, attention);
  const int64_t positions = loops.positions, dim = loops.dim, stride = loops.stride;
  const int64_t dstride = row_stride(dpacked);
  const Scratch<T> scratch(2 * positions * (loops.block + dim), packed.options());
  at::parallel_for(0, loops.tasks(), 1, [&](int64_t begin, int64_t end) {
    T* const p = scratch.mine();
    T* const ds = p + loops.block * positions;
    // Summed over the blocks of the group's queries. Stored only at the end, because k and v may lie in the
    // same memory.
    T* const dk = ds + loops.block * positions;
    T* const dv = dk + positions * dim;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t b = task / loops.kv_heads, kv = task % loops.kv_heads;
      const T* const rows = numbers<T>(packed) + b * positions * stride;
      T* const drows = mutable_numbers<T>(dpacked) + b * positions * dstride;
      const int64_t k_column = loops.k_column(kv), v_column = loops.v_column(kv);
      const Matrix<const T> k{rows + k_column, stride};
      const Matrix<const T> v{rows + v_column, stride};
      std::fill_n(dk, 2 * positions * dim, T(0));  // dk and dv
      loops.for_blocks(b, kv, [&](int64_t h, int64_t query, const ScoreBlock<T>& scores) {
        const int64_t count = scores.rows, keys = scores.cols;
        const int64_t at_q = query * stride + h * dim, at_out = loops.at_out(b, h, query);
        const Matrix<const T> q{rows + at_q, stride};
        const Matrix<const T> dy{numbers<T>(dout) + at_out, loops.out_stride};
        gemm<T>(false, true, count, keys, dim, 1, q, k, 0, {p, keys});
        gemm<T>(false, true, count, keys, dim, 1, dy, v, 0, {ds, keys});
        kernels<T>().softmax_backward(scores, p, ds, numbers<T>(log_sum_exp) + loops.row(b, h, query),
                                      numbers<T>(out) + at_out, dy.data, dim, loops.out_stride);
        gemm<T>(true, false, keys, dim, count, 1, {p, keys}, dy, 1, {dv, dim});
        gemm<T>(true, false, keys, dim, count, 1, {ds, keys}, q, 1, {dk, dim});
        // The block's queries are no longer needed.
        gemm<T>(false, false, count, dim, keys, 1, {ds, keys}, k, 0,
                {drows + query * dstride + h * dim, dstride});
      });
      for (int64_t s = 0; s < positions; ++s) {
        std::copy_n(dk + s * dim, dim, drows + s * dstride + k_column);
        std::copy_n(dv + s * dim, dim, drows + s * dstride + v_column);
      }
    }
  });
}

}  // namespace

void packed_attention_forward(const at::Tensor& packed, const PackedAttention& attention, at::Tensor& out,
                              at::Tensor& log_sum_exp) {
  if (by_operators(packed)) return operators::attention_forward(packed, attention, out, log_sum_exp);
  dispatch_wide(packed, [&](auto zero) { forward<decltype(zero)>(packed, attention, out, log_sum_exp); });
}

void packed_attention_backward(const at::Tensor& packed, const PackedAttention& attention,
                               const at::Tensor& out, const at::Tensor& log_sum_exp, const at::Tensor& dout,
                               at::Tensor& dpacked) {
  if (by_operators(packed)) {
    return operators::attention_backward(packed, attention, out, log_sum_exp, dout, dpacked);
  }
  dispatch_wide(packed, [&](auto zero) {
    backward<decltype(zero)>(packed, attention, out, log_sum_exp, dout, dpacked);
  });
}

}  // namespace twobp
