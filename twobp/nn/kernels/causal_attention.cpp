#include "twobp/nn/kernels/causal_attention.h"

#include <algorithm>
#include <cmath>

#include "twobp/nn/kernels/blas.h"
#include "twobp/nn/kernels/rows.h"

namespace twobp {
namespace {

constexpr int64_t kBlock = 64;  // queries that are worked on together

// Scratch memory of each thread, allocated where the rank's meter sees it.
template <typename T>
class Scratch {
 public:
  Scratch(int64_t numbers, const at::TensorOptions& options)
      : all_(at::empty({at::get_num_threads(), (numbers + kAligned - 1) / kAligned * kAligned}, options)) {}
  T* mine() const { return all_.mutable_data_ptr<T>() + at::get_thread_num() * all_.size(1); }

 private:
  static constexpr int64_t kAligned = 16;  // numbers: every thread's begins as the first one's
  at::Tensor all_;
};

// Calls body(first, count) for the blocks of queries.
template <typename Body>
void for_blocks(int64_t positions, Body&& body) {
  for (int64_t first = 0; first < positions; first += kBlock)
    body(first, std::min(kBlock, positions - first));
}

template <typename T>
void forward(const at::Tensor& packed, const PackedHeads& shape, at::Tensor& out, at::Tensor& log_sum_exp) {
  const int64_t positions = packed.size(1), dim = shape.head_dim;
  const int64_t stride = shape.packed(), out_stride = shape.heads * dim;
  const int64_t group = shape.heads / shape.kv_heads;
  const T scale = T(1) / std::sqrt(T(dim));
  const Scratch<T> scratch(kBlock * positions, packed.options());
  at::parallel_for(0, packed.size(0) * shape.kv_heads, 1, [&](int64_t begin, int64_t end) {
    T* const scores = scratch.mine();
    for (int64_t task = begin; task < end; ++task) {
      const int64_t b = task / shape.kv_heads, kv = task % shape.kv_heads;
      const T* const rows = numbers<T>(packed) + b * positions * stride;
      const Matrix<const T> k{rows + (shape.heads + kv) * dim, stride};
      const Matrix<const T> v{rows + (shape.heads + shape.kv_heads + kv) * dim, stride};
      for (int64_t h = kv * group; h < (kv + 1) * group; ++h) {
        T* const lse = mutable_numbers<T>(log_sum_exp) + (b * shape.heads + h) * positions;
        for_blocks(positions, [&](int64_t first, int64_t count) {
          const int64_t keys = first + count;
          const Matrix<const T> q{rows + first * stride + h * dim, stride};
          const Matrix<T> y{mutable_numbers<T>(out) + (b * positions + first) * out_stride + h * dim,
                            out_stride};
          gemm<T>(false, true, count, keys, dim, 1, q, k, 0, {scores, keys});
          kernels<T>().causal_softmax(scores, lse + first, count, keys, first, scale);
          gemm<T>(false, false, count, dim, keys, 1, {scores, keys}, v, 0, y);
        });
      }
    }
  });
}

template <typename T>
void backward(const at::Tensor& packed, const PackedHeads& shape, const at::Tensor& out,
              const at::Tensor& log_sum_exp, const at::Tensor& dout, at::Tensor& dpacked) {
  const int64_t positions = packed.size(1), dim = shape.head_dim;
  const int64_t stride = shape.packed(), out_stride = shape.heads * dim;
  const int64_t group = shape.heads / shape.kv_heads;
  const T scale = T(1) / std::sqrt(T(dim));
  const Scratch<T> scratch(2 * positions * (kBlock + dim), packed.options());
  at::parallel_for(0, packed.size(0) * shape.kv_heads, 1, [&](int64_t begin, int64_t end) {
    T* const probabilities = scratch.mine();
    T* const gradients = probabilities + kBlock * positions;
    // Summed over the queries of the group, then put where k and v may still lie until then.
    T* const dk = gradients + kBlock * positions;
    T* const dv = dk + positions * dim;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t b = task / shape.kv_heads, kv = task % shape.kv_heads;
      const T* const rows = numbers<T>(packed) + b * positions * stride;
      T* const drows = mutable_numbers<T>(dpacked) + b * positions * stride;
      const int64_t k_column = (shape.heads + kv) * dim;
      const int64_t v_column = (shape.heads + shape.kv_heads + kv) * dim;
      const Matrix<const T> k{rows + k_column, stride};
      const Matrix<const T> v{rows + v_column, stride};
      std::fill_n(dk, 2 * positions * dim, T(0));
      for (int64_t h = kv * group; h < (kv + 1) * group; ++h) {
        const T* const lse = numbers<T>(log_sum_exp) + (b * shape.heads + h) * positions;
        for_blocks(positions, [&](int64_t first, int64_t count) {
          const int64_t keys = first + count;
          const int64_t at_out = (b * positions + first) * out_stride + h * dim;
          const Matrix<const T> q{rows + first * stride + h * dim, stride};
          const Matrix<const T> dy{numbers<T>(dout) + at_out, out_stride};
          gemm<T>(false, true, count, keys, dim, 1, q, k, 0, {probabilities, keys});
          gemm<T>(false, true, count, keys, dim, 1, dy, v, 0, {gradients, keys});
          kernels<T>().causal_softmax_backward(probabilities, gradients, lse + first,
                                               numbers<T>(out) + at_out, dy.data, count, keys, first, scale,
                                               dim, out_stride);
          gemm<T>(true, false, keys, dim, count, 1, {probabilities, keys}, dy, 1, {dv, dim});
          gemm<T>(true, false, keys, dim, count, 1, {gradients, keys}, q, 1, {dk, dim});
          // The block's queries are not needed any more.
          gemm<T>(false, false, count, dim, keys, 1, {gradients, keys}, k, 0,
                  {drows + first * stride + h * dim, stride});
        });
      }
      for (int64_t p = 0; p < positions; ++p) {
        std::copy_n(dk + p * dim, dim, drows + p * stride + k_column);
        std::copy_n(dv + p * dim, dim, drows + p * stride + v_column);
      }
    }
  });
}

template <typename Body>
void dispatch_wide(const at::Tensor& packed, Body&& body) {
  if (packed.scalar_type() == at::kFloat) {
    body(float{});
  } else {
    body(double{});
  }
}

}  // namespace

void causal_attention_forward(const at::Tensor& packed, const PackedHeads& shape, at::Tensor& out,
                              at::Tensor& log_sum_exp) {
  dispatch_wide(packed, [&](auto zero) { forward<decltype(zero)>(packed, shape, out, log_sum_exp); });
}

void causal_attention_backward(const at::Tensor& packed, const PackedHeads& shape, const at::Tensor& out,
                               const at::Tensor& log_sum_exp, const at::Tensor& dout, at::Tensor& dpacked) {
  dispatch_wide(packed,
                [&](auto zero) { backward<decltype(zero)>(packed, shape, out, log_sum_exp, dout, dpacked); });
}

}  // namespace twobp
