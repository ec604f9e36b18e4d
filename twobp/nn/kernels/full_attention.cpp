#include "twobp/nn/kernels/full_attention.h"

#include <algorithm>
#include <cmath>

#include "twobp/nn/kernels/blas.h"
#include "twobp/nn/kernels/encoder_kernels.h"
#include "twobp/nn/kernels/rows.h"

namespace twobp {
namespace {

constexpr int64_t kBlock = 128;  // queries that are worked on together

// What the loops over samples, heads and blocks of queries share.
template <typename T>
struct Sizes {
  Sizes(const at::Tensor& packed, const FullAttention& attention)
      : batch(packed.size(0)),
        positions(packed.size(1)),
        heads(attention.heads),
        dim(attention.head_dim),
        shift(attention.shift.defined() ? numbers<T>(attention.shift) : nullptr) {}

  int64_t width() const { return heads * dim; }
  int64_t stride() const { return 3 * width(); }
  double scale() const { return 1 / std::sqrt(static_cast<double>(dim)); }
  const T* shift_of(int64_t sample) const { return shift == nullptr ? nullptr : shift + sample * positions; }

  int64_t batch, positions, heads, dim;
  const T* shift;
};

// Calls body(first, count) for the blocks of queries.
template <typename Body>
void for_blocks(int64_t positions, Body&& body) {
  for (int64_t first = 0; first < positions; first += kBlock)
    body(first, std::min(kBlock, positions - first));
}

// Scratch memory of each thread, allocated where the rank's meter sees it.
at::Tensor scratch_of(int64_t count, const at::Tensor& like) {
  constexpr int64_t kAligned = 16;  // numbers: every thread's begins as the first one's
  return at::empty({at::get_num_threads(), (count + kAligned - 1) / kAligned * kAligned}, like.options());
}

template <typename T>
void forward(const at::Tensor& packed, const FullAttention& attention, at::Tensor& out,
             at::Tensor& log_sum_exp) {
  const Sizes<T> s(packed, attention);
  const at::Tensor scratch = scratch_of(kBlock * s.positions, packed);
  at::parallel_for(0, s.batch * s.heads, 1, [&](int64_t begin, int64_t end) {
    T* const scores = mutable_numbers<T>(scratch) + at::get_thread_num() * scratch.size(1);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t sample = task / s.heads, head = task % s.heads;
      const T* const rows = numbers<T>(packed) + sample * s.positions * s.stride() + head * s.dim;
      const Matrix<const T> k{rows + s.width(), s.stride()};
      const Matrix<const T> v{rows + 2 * s.width(), s.stride()};
      for_blocks(s.positions, [&](int64_t first, int64_t count) {
        const int64_t row = task * s.positions + first;
        gemm<T>(false, true, count, s.positions, s.dim, 1, {rows + first * s.stride(), s.stride()}, k, 0,
                {scores, s.positions});
        encoder_kernels<T>().softmax_forward(scores, s.shift_of(sample),
                                             mutable_numbers<T>(log_sum_exp) + row, count, s.positions,
                                             s.scale(), attention.mask, row);
        T* const y = mutable_numbers<T>(out) + (sample * s.positions + first) * s.width() + head * s.dim;
        gemm<T>(false, false, count, s.dim, s.positions, 1, {scores, s.positions}, v, 0, {y, s.width()});
      });
    }
  });
}

template <typename T>
void backward(const at::Tensor& packed, const FullAttention& attention, const at::Tensor& out,
              const at::Tensor& log_sum_exp, const at::Tensor& dout, at::Tensor& dpacked) {
  const Sizes<T> s(packed, attention);
  const at::Tensor scratch = scratch_of(2 * s.positions * (kBlock + s.dim), packed);
  at::parallel_for(0, s.batch * s.heads, 1, [&](int64_t begin, int64_t end) {
    T* const scores = mutable_numbers<T>(scratch) + at::get_thread_num() * scratch.size(1);
    T* const gradients = scores + kBlock * s.positions;
    // Summed over the blocks, then put where k and v may still lie until then.
    T* const dk = gradients + kBlock * s.positions;
    T* const dv = dk + s.positions * s.dim;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t sample = task / s.heads, head = task % s.heads;
      const int64_t at_packed = sample * s.positions * s.stride() + head * s.dim;
      const T* const rows = numbers<T>(packed) + at_packed;
      T* const drows = mutable_numbers<T>(dpacked) + at_packed;
      const Matrix<const T> k{rows + s.width(), s.stride()};
      const Matrix<const T> v{rows + 2 * s.width(), s.stride()};
      for_blocks(s.positions, [&](int64_t first, int64_t count) {
        const int64_t row = task * s.positions + first;
        const int64_t at_out = (sample * s.positions + first) * s.width() + head * s.dim;
        const Matrix<const T> q{rows + first * s.stride(), s.stride()};
        const Matrix<const T> dy{numbers<T>(dout) + at_out, s.width()};
        gemm<T>(false, true, count, s.positions, s.dim, 1, q, k, 0, {scores, s.positions});
        gemm<T>(false, true, count, s.positions, s.dim, 1, dy, v, 0, {gradients, s.positions});
        encoder_kernels<T>().softmax_backward(
            scores, gradients, s.shift_of(sample), numbers<T>(log_sum_exp) + row, numbers<T>(out) + at_out,
            dy.data, count, s.positions, s.scale(), attention.mask, row, s.dim, s.width());
        const T sum = first == 0 ? T(0) : T(1);
        gemm<T>(true, false, s.positions, s.dim, count, 1, {scores, s.positions}, dy, sum, {dv, s.dim});
        gemm<T>(true, false, s.positions, s.dim, count, 1, {gradients, s.positions}, q, sum, {dk, s.dim});
        // The block's queries are not needed any more.
        gemm<T>(false, false, count, s.dim, s.positions, 1, {gradients, s.positions}, k, 0,
                {drows + first * s.stride(), s.stride()});
      });
      for (int64_t p = 0; p < s.positions; ++p) {
        std::copy_n(dk + p * s.dim, s.dim, drows + p * s.stride() + s.width());
        std::copy_n(dv + p * s.dim, s.dim, drows + p * s.stride() + 2 * s.width());
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

void full_attention_forward(const at::Tensor& packed, const FullAttention& attention, at::Tensor& out,
                            at::Tensor& log_sum_exp) {
  dispatch_wide(packed, [&](auto zero) { forward<decltype(zero)>(packed, attention, out, log_sum_exp); });
}

void full_attention_backward(const at::Tensor& packed, const FullAttention& attention, const at::Tensor& out,
                             const at::Tensor& log_sum_exp, const at::Tensor& dout, at::Tensor& dpacked) {
  dispatch_wide(packed, [&](auto zero) {
    backward<decltype(zero)>(packed, attention, out, log_sum_exp, dout, dpacked);
  });
}

}  // namespace twobp
