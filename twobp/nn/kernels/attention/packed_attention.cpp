#include "twobp/nn/kernels/attention/packed_attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

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

// The first key that each query sees.
using Starts = std::vector<int64_t>;

std::vector<Starts> starts_of(const PackedAttention& attention, int64_t positions) {
  if (!attention.causal || (attention.window == 0 && !attention.starts.defined())) return {};
  const at::Tensor given =
      attention.starts.defined() ? attention.starts.cpu().contiguous() : at::zeros({1, positions}, at::kLong);
  std::vector<Starts> all(given.size(0));
  for (size_t b = 0; b < all.size(); ++b) {
    const int64_t* from = given.const_data_ptr<int64_t>() + static_cast<int64_t>(b) * positions;
    for (int64_t i = 0; i < positions; ++i) {
      const int64_t of_window = attention.window > 0 ? i - attention.window + 1 : 0;
      all[b].push_back(std::max(from[i], of_window));
    }
  }
  return all;
}

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
        scale(attention.scale > 0 ? T(attention.scale) : T(1) / std::sqrt(T(dim))),
        shift(attention.shift.defined() ? numbers<T>(attention.shift) : nullptr),
        starts(starts_of(attention, positions)) {}

  int64_t tasks() const { return batch * kv_heads; }
  // The row in log_sum_exp and in dropout's mask.
  int64_t row(int64_t b, int64_t h, int64_t query) const { return (b * heads + h) * positions + query; }
  int64_t at_out(int64_t b, int64_t h, int64_t query) const {
    return (b * positions + query) * out_stride + h * dim;
  }

  // Calls body(h, query, key, scores) for the query heads of a key-value head, block by block. `query` is the
  // block's first query, `key` its first key, and scores.cols its number of keys.
  template <typename Body>
  void for_blocks(int64_t b, int64_t kv, Body&& body) const {
    const int64_t group = heads / kv_heads;
    const Starts& from = starts.empty() ? none : starts[starts.size() == 1 ? 0 : b];
    for (int64_t h = kv * group; h < (kv + 1) * group; ++h) {
      for (int64_t query = 0; query < positions; query += block) {
        const int64_t key = from.empty() ? 0 : from[query];
        ScoreBlock<T> scores;
        scores.rows = std::min(block, positions - query);
        scores.cols = (attention.causal ? query + scores.rows : positions) - key;
        scores.seen = (attention.causal ? query + 1 : positions) - key;
        Starts columns;
        if (!from.empty()) {
          for (int64_t r = 0; r < scores.rows; ++r) columns.push_back(from[query + r] - key);
          scores.starts = columns.data();
        }
        scores.scale = scale;
        scores.cap = T(attention.cap);
        scores.shift = shift == nullptr ? nullptr : shift + b * positions + key;
        scores.dropout = attention.dropout;
        scores.row_begin = row(b, h, query);
        scores.mask_cols = positions;
        body(h, query, key, scores);
      }
    }
  }

  const PackedAttention& attention;
  int64_t batch, positions, heads, kv_heads, dim, stride, out_stride, block;
  T scale;
  const T* shift;
  std::vector<Starts> starts;  // of each sample; one: of all; empty: 0
  const Starts none{};
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
      loops.for_blocks(b, kv, [&](int64_t h, int64_t query, int64_t key, const ScoreBlock<T>& scores) {
        const Matrix<const T> q{rows + query * stride + attention.q_column(h), stride};
        const Matrix<const T> k{rows + key * stride + attention.k_column(kv), stride};
        const Matrix<const T> v{rows + key * stride + attention.v_column(kv), stride};
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
      const int64_t k_column = attention.k_column(kv), v_column = attention.v_column(kv);
      std::fill_n(dk, 2 * positions * dim, T(0));  // dk and dv
      loops.for_blocks(b, kv, [&](int64_t h, int64_t query, int64_t key, const ScoreBlock<T>& scores) {
        const int64_t count = scores.rows, keys = scores.cols;
        const int64_t q_column = attention.q_column(h), at_out = loops.at_out(b, h, query);
        const Matrix<const T> q{rows + query * stride + q_column, stride};
        const Matrix<const T> k{rows + key * stride + k_column, stride};
        const Matrix<const T> v{rows + key * stride + v_column, stride};
        const Matrix<const T> dy{numbers<T>(dout) + at_out, loops.out_stride};
        gemm<T>(false, true, count, keys, dim, 1, q, k, 0, {p, keys});
        gemm<T>(false, true, count, keys, dim, 1, dy, v, 0, {ds, keys});
        kernels<T>().softmax_backward(scores, p, ds, numbers<T>(log_sum_exp) + loops.row(b, h, query),
                                      numbers<T>(out) + at_out, dy.data, dim, loops.out_stride);
        gemm<T>(true, false, keys, dim, count, 1, {p, keys}, dy, 1, {dv + key * dim, dim});
        gemm<T>(true, false, keys, dim, count, 1, {ds, keys}, q, 1, {dk + key * dim, dim});
        // The block's queries are no longer needed.
        gemm<T>(false, false, count, dim, keys, 1, {ds, keys}, k, 0,
                {drows + query * dstride + q_column, dstride});
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
