#include "twobp/nn/kernels/attention/packed_attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "twobp/nn/kernels/products/product_time.h"
#include "twobp/nn/kernels/products/products.h"
#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/kernels/rows/operators.h"

namespace twobp {
namespace {

// Queries in a block. Causal blocks are smaller, because a block computes with keys that its first queries do not see.
// In a later slice of a sequence, that is a small part of its keys.
constexpr int64_t kBlock = 128;
constexpr int64_t kCausalBlock = 64;

// The first key that each query sees.
using Starts = std::vector<int64_t>;

std::vector<Starts> starts_of(const PackedAttention& attention, int64_t positions) {
  if (!attention.causal || (attention.window == 0 && !attention.documents)) return {};
  const at::Tensor given = attention.documents ? attention.documents->starts() : at::zeros({1, positions}, at::kLong);
  const int64_t past = attention.past();
  std::vector<Starts> all(given.size(0));
  for (size_t b = 0; b < all.size(); ++b) {
    const int64_t* from = given.const_data_ptr<int64_t>() + static_cast<int64_t>(b) * positions;
    for (int64_t i = 0; i < positions; ++i) {
      const int64_t of_window = attention.window > 0 ? past + i - attention.window + 1 : 0;
      all[b].push_back(std::max(from[i], of_window));
    }
  }
  return all;
}

// State that the loops over samples, heads and blocks of queries share.
template <typename T>
struct Loops {
  Loops(const at::Tensor& packed, const PackedAttention& attention, int64_t block)
      : attention(attention),
        batch(packed.size(0)),
        positions(packed.size(1)),
        past(attention.past()),
        heads(attention.heads),
        kv_heads(attention.kv_heads),
        dim(attention.head_dim),
        value_dim(attention.value_width()),
        stride(row_stride(packed)),
        out_stride(attention.out_width()),
        block(block),
        scale(attention.scale > 0 ? T(attention.scale) : T(1) / std::sqrt(T(dim))),
        shift(attention.shift.defined() ? numbers<T>(attention.shift) : nullptr),
        starts(starts_of(attention, positions)) {}

  int64_t tasks() const { return batch * kv_heads; }
  int64_t keys() const { return past + positions; }
  // The row in log_sum_exp and in dropout's mask.
  int64_t row(int64_t b, int64_t h, int64_t query) const { return (b * heads + h) * positions + query; }
  int64_t at_out(int64_t b, int64_t h, int64_t query) const {
    return (b * positions + query) * out_stride + h * value_dim;
  }

  // Calls body(h, query, key, scores) for the query heads of a key-value head, block by block. `query` is the block's
  // first query, `key` its first key, and scores.cols its number of keys.
  template <typename Body>
  void for_blocks(int64_t b, int64_t kv, Body&& body) const {
    const int64_t group = heads / kv_heads;
    const Starts& from = starts.empty() ? none : starts[starts.size() == 1 ? 0 : b];
    for (int64_t h = kv * group; h < (kv + 1) * group; ++h) {
      for (int64_t query = 0; query < positions; query += block) {
        const int64_t key = from.empty() ? 0 : from[query];
        ScoreBlock<T> scores;
        scores.rows = std::min(block, positions - query);
        scores.cols = (attention.causal ? past + query + scores.rows : positions) - key;
        scores.seen = (attention.causal ? past + query + 1 : positions) - key;
        Starts columns;
        if (!from.empty()) {
          for (int64_t r = 0; r < scores.rows; ++r) columns.push_back(from[query + r] - key);
          scores.starts = columns.data();
        }
        scores.scale = scale;
        scores.cap = T(attention.cap);
        scores.shift = shift == nullptr ? nullptr : shift + b * keys() + key;
        scores.dropout = attention.dropout;
        scores.row_begin = row(b, h, query);
        scores.mask_cols = attention.dropout.length > 0 ? attention.dropout.positions : positions;
        body(h, query, key, scores);
      }
    }
  }

  // Adds a gradient (B, count, K (D + V)) of keys and values to dk (count, D) and dv (count, V).
  void add_rows(const at::Tensor& gradient, int64_t b, int64_t kv, int64_t count, T* dk, T* dv) const {
    const int64_t width = attention.kv_width();
    const T* from = numbers<T>(gradient) + b * count * width;
    for (int64_t s = 0; s < count; ++s, from += width, dk += dim, dv += value_dim) {
      for (int64_t c = 0; c < dim; ++c) dk[c] += from[kv * dim + c];
      for (int64_t c = 0; c < value_dim; ++c) dv[c] += from[kv_heads * dim + kv * value_dim + c];
    }
  }

  const PackedAttention& attention;
  int64_t batch, positions, past, heads, kv_heads, dim, value_dim, stride, out_stride, block;
  T scale;
  const T* shift;
  std::vector<Starts> starts;  // of each sample; one: of all; empty: 0
  const Starts none{};
};

// Keys and values of one head that lie together: positions [begin, begin + count).
template <typename T>
struct KeyPart {
  int64_t begin = 0;
  int64_t count = 0;
  Matrix<const T> k, v;
  Matrix<T> dk{}, dv{};  // of a backward pass, to which it adds
};

// The keys and values of a slice and of those before it. Without slices, there is one part.
template <typename T>
class KeyParts {
 public:
  KeyParts(const at::Tensor& packed, const PackedAttention& attention) : packed_(packed), attention_(attention) {}

  std::vector<KeyPart<T>> of(int64_t b, int64_t kv) const {
    std::vector<KeyPart<T>> parts;
    int64_t begin = 0;
    const auto add = [&](const at::Tensor& rows, int64_t k_column, int64_t v_column) {
      const int64_t count = rows.size(1), stride = row_stride(rows);
      const T* const from = numbers<T>(rows) + b * count * stride;
      parts.push_back({begin, count, {from + k_column, stride}, {from + v_column, stride}});
      begin += count;
    };
    const int64_t k_column = kv * attention_.head_dim;  // of rows that have keys and values alone
    const int64_t v_column = attention_.kv_heads * attention_.head_dim + kv * attention_.value_width();
    const int64_t width = attention_.kv_width();
    for (const EarlierKeys& keys : attention_.earlier) {
      if (keys.packed) add(keys.rows, attention_.k_column(kv), attention_.v_column(kv));
      if (!keys.packed) add(keys.rows, k_column, v_column);
      if (!keys.gradient.defined()) continue;
      T* const to = mutable_numbers<T>(keys.gradient) + b * keys.rows.size(1) * width;
      parts.back().dk = {to + k_column, width};
      parts.back().dv = {to + v_column, width};
    }
    add(packed_, attention_.k_column(kv), attention_.v_column(kv));
    return parts;
  }

 private:
  const at::Tensor& packed_;
  const PackedAttention& attention_;
};

// Calls body(part, column, count) for the keys [key, key + cols) part by part: `column` counts from `key`.
template <typename T, typename Body>
void for_parts(const std::vector<KeyPart<T>>& parts, int64_t key, int64_t cols, Body&& body) {
  for (const KeyPart<T>& part : parts) {
    const int64_t first = std::max(key, part.begin);
    const int64_t count = std::min(key + cols, part.begin + part.count) - first;
    if (count <= 0) continue;
    KeyPart<T> seen = part;
    seen.k.data += (first - part.begin) * part.k.stride;
    seen.v.data += (first - part.begin) * part.v.stride;
    if (part.dk.data != nullptr) {
      seen.dk.data += (first - part.begin) * part.dk.stride;
      seen.dv.data += (first - part.begin) * part.dv.stride;
    }
    body(seen, first - key, count);
  }
}

// Calls body(key, tile) for tiles of a block's columns whose probabilities backward recomputes apart: those of one
// part, which stay in the cache between the products. Dropout's mask is of whole rows.
template <typename T, typename Body>
void for_tiles(const std::vector<KeyPart<T>>& parts, int64_t key, const ScoreBlock<T>& scores, Body&& body) {
  if (parts.size() == 1 || scores.dropout.threshold > 0) return body(key, scores);
  for_parts(parts, key, scores.cols, [&](const KeyPart<T>&, int64_t column, int64_t count) {
    ScoreBlock<T> tile = scores;
    tile.cols = count;
    tile.seen -= column;
    if (tile.shift != nullptr) tile.shift += column;
    Starts columns;
    if (scores.starts != nullptr) {
      for (int64_t r = 0; r < scores.rows; ++r) {
        columns.push_back(std::clamp<int64_t>(scores.starts[r] - column, 0, count));
      }
      tile.starts = columns.data();
    }
    body(key + column, tile);
  });
}

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
void forward(const at::Tensor& packed, const PackedAttention& attention, at::Tensor& out, at::Tensor& log_sum_exp) {
  const Loops<T> loops(packed, attention, attention.causal ? kCausalBlock : kBlock);
  const int64_t dim = loops.dim, stride = loops.stride;
  const KeyParts<T> parts(packed, attention);
  const Scratch<T> scratch(loops.block * loops.keys(), packed.options());
  at::parallel_for(0, loops.tasks(), 1, [&](int64_t begin, int64_t end) {
    T* const p = scratch.mine();
    for (int64_t task = begin; task < end; ++task) {
      const int64_t b = task / loops.kv_heads, kv = task % loops.kv_heads;
      const T* const rows = numbers<T>(packed) + b * loops.positions * stride;
      const std::vector<KeyPart<T>> all = parts.of(b, kv);
      loops.for_blocks(b, kv, [&](int64_t h, int64_t query, int64_t key, const ScoreBlock<T>& scores) {
        const Matrix<const T> q{rows + query * stride + attention.q_column(h), stride};
        const Matrix<T> y{mutable_numbers<T>(out) + loops.at_out(b, h, query), loops.out_stride};
        for_parts(all, key, scores.cols, [&](const KeyPart<T>& part, int64_t column, int64_t count) {
          gemm<T>(false, true, scores.rows, count, dim, 1, q, part.k, 0, {p + column, scores.cols});
        });
        kernels<T>().softmax_forward(scores, p, mutable_numbers<T>(log_sum_exp) + loops.row(b, h, query));
        for_parts(all, key, scores.cols, [&](const KeyPart<T>& part, int64_t column, int64_t count) {
          gemm<T>(false, false, scores.rows, loops.value_dim, count, 1, {p + column, scores.cols}, part.v, column > 0,
                  y);
        });
      });
    }
  });
}

template <typename T>
void backward(const at::Tensor& packed, const PackedAttention& attention, const at::Tensor& out,
              const at::Tensor& log_sum_exp, const at::Tensor& dout, at::Tensor& dpacked) {
  const Loops<T> loops(packed, attention, attention.causal && attention.earlier.empty() ? kCausalBlock : kBlock);
  const int64_t positions = loops.positions, dim = loops.dim, value_dim = loops.value_dim, stride = loops.stride;
  const int64_t dstride = row_stride(dpacked);
  const KeyParts<T> parts(packed, attention);
  const int64_t all_keys = loops.keys();
  const Scratch<T> scratch(2 * all_keys * loops.block + positions * (dim + value_dim) + loops.block * dim,
                           packed.options());
  at::parallel_for(0, loops.tasks(), 1, [&](int64_t begin, int64_t end) {
    T* const p = scratch.mine();
    T* const ds = p + loops.block * all_keys;
    // Summed over the blocks of the group's queries. Stored only at the end, because k and v may lie in the same
    // memory.
    T* const dk = ds + loops.block * all_keys;
    T* const dv = dk + positions * dim;
    T* const dq = dv + positions * value_dim;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t b = task / loops.kv_heads, kv = task % loops.kv_heads;
      const T* const rows = numbers<T>(packed) + b * positions * stride;
      T* const drows = mutable_numbers<T>(dpacked) + b * positions * dstride;
      const int64_t k_column = attention.k_column(kv), v_column = attention.v_column(kv);
      std::vector<KeyPart<T>> all = parts.of(b, kv);
      all.back().dk = {dk, dim};
      all.back().dv = {dv, value_dim};
      std::fill_n(dk, positions * (dim + value_dim), T(0));  // dk and dv
      loops.for_blocks(b, kv, [&](int64_t h, int64_t query, int64_t key, const ScoreBlock<T>& scores) {
        const int64_t count = scores.rows;
        const int64_t q_column = attention.q_column(h), at_out = loops.at_out(b, h, query);
        const Matrix<const T> q{rows + query * stride + q_column, stride};
        const Matrix<const T> dy{numbers<T>(dout) + at_out, loops.out_stride};
        bool first = true;
        for_tiles(all, key, scores, [&](int64_t first_key, const ScoreBlock<T>& tile) {
          const int64_t keys = tile.cols;
          for_parts(all, first_key, keys, [&](const KeyPart<T>& part, int64_t column, int64_t n) {
            gemm<T>(false, true, count, n, dim, 1, q, part.k, 0, {p + column, keys});
            gemm<T>(false, true, count, n, value_dim, 1, dy, part.v, 0, {ds + column, keys});
          });
          kernels<T>().softmax_backward(tile, p, ds, numbers<T>(log_sum_exp) + loops.row(b, h, query),
                                        numbers<T>(out) + at_out, dy.data, value_dim, loops.out_stride);
          for_parts(all, first_key, keys, [&](const KeyPart<T>& part, int64_t column, int64_t n) {
            gemm<T>(true, false, n, value_dim, count, 1, {p + column, keys}, dy, 1, part.dv);
            gemm<T>(true, false, n, dim, count, 1, {ds + column, keys}, q, 1, part.dk);
            gemm<T>(false, false, count, dim, n, 1, {ds + column, keys}, part.k, first ? 0 : 1, {dq, dim});
            first = false;
          });
        });
        // q, which may lie in the same memory, is no longer needed.
        for (int64_t r = 0; r < count; ++r) std::copy_n(dq + r * dim, dim, drows + (query + r) * dstride + q_column);
      });
      if (attention.from_later.defined()) loops.add_rows(attention.from_later, b, kv, positions, dk, dv);
      for (int64_t s = 0; s < positions; ++s) {
        std::copy_n(dk + s * dim, dim, drows + s * dstride + k_column);
        std::copy_n(dv + s * value_dim, value_dim, drows + s * dstride + v_column);
      }
    }
  });
}

// Additions and multiplications of products of queries and keys, `of_keys` with numbers of queries or keys and
// `of_values` with those of values: what gemm() counts on a CPU. Documents count as one.
double operations(const at::Tensor& packed, const PackedAttention& attention, int64_t of_keys, int64_t of_values) {
  const int64_t positions = packed.size(1), past = attention.past();
  int64_t pairs = attention.causal ? 0 : positions * positions;
  for (int64_t query = 0; attention.causal && query < positions; ++query) {
    const int64_t keys = past + query + 1;
    pairs += attention.window == 0 ? keys : std::min(keys, attention.window);
  }
  const int64_t width = of_keys * attention.head_dim + of_values * attention.value_width();
  return 2.0 * static_cast<double>(pairs) * static_cast<double>(packed.size(0) * attention.heads * width);
}

}  // namespace

at::ScalarType attention_type(const at::Tensor& packed, const PackedAttention& attention) {
  const at::ScalarType type = packed.scalar_type();
  return takes_fused_attention(packed, attention) ? type : compute_type(type);
}

void packed_attention_forward(const at::Tensor& packed, const PackedAttention& attention, at::Tensor& out,
                              at::Tensor& log_sum_exp) {
  const bool fused = takes_fused_attention(packed, attention);
  if (fused || by_operators(packed)) count_operations(operations(packed, attention, 1, 1));
  if (fused) return fused_attention_forward(packed, attention, out, log_sum_exp);
  if (by_operators(packed)) return operators::attention_forward(packed, attention, out, log_sum_exp);
  dispatch_wide(packed, [&](auto zero) { forward<decltype(zero)>(packed, attention, out, log_sum_exp); });
}

void packed_attention_backward(const at::Tensor& packed, const PackedAttention& attention, const at::Tensor& out,
                               const at::Tensor& log_sum_exp, const at::Tensor& dout, at::Tensor& dpacked) {
  const bool fused = takes_fused_attention(packed, attention);
  if (fused || by_operators(packed)) count_operations(operations(packed, attention, 3, 2));
  if (fused) return fused_attention_backward(packed, attention, out, log_sum_exp, dout, dpacked);
  if (by_operators(packed)) {
    return operators::attention_backward(packed, attention, out, log_sum_exp, dout, dpacked);
  }
  dispatch_wide(packed,
                [&](auto zero) { backward<decltype(zero)>(packed, attention, out, log_sum_exp, dout, dpacked); });
}

}  // namespace twobp
