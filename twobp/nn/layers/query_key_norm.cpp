#include "twobp/nn/layers/query_key_norm.h"

#include <algorithm>

#include "twobp/nn/kernels/operators.h"
#include "twobp/nn/kernels/products/padded_rows.h"
#include "twobp/nn/kernels/products/rows.h"

namespace twobp {
namespace {

// The gains' gradients are summed over blocks of this many rows, then over the blocks. The sums are the same for any
// number of threads.
constexpr int64_t kQueryKeyBlockRows = 64;

// A part of the rows as (rows, norms, cols).
at::Tensor norms_of(const at::Tensor& rows, int64_t first, int64_t count, int64_t cols) {
  return rows.narrow(1, first, count * cols).unflatten(1, {count, cols});
}

}  // namespace

QueryKeyNorm::QueryKeyNorm(const std::string& query, const std::string& key, const QueryKeyNormShape& shape, double eps,
                           at::ScalarType dtype, GainForm form)
    : shape_(shape),
      dtype_(dtype),
      eps_(eps),
      query_(query, shape.whole ? shape.heads * shape.head_dim : shape.head_dim, dtype, form),
      key_(key, shape.whole ? shape.kv_heads * shape.head_dim : shape.head_dim, dtype, form) {}

std::vector<QueryKeyNorm::Part> QueryKeyNorm::parts() {
  const int64_t queries = shape_.heads * shape_.head_dim;
  const int64_t keys = shape_.kv_heads * shape_.head_dim;
  if (shape_.whole) return {{0, 1, queries, 0, &query_}, {queries, 1, keys, 1, &key_}};
  return {{0, shape_.heads, shape_.head_dim, 0, &query_},
          {queries, shape_.kv_heads, shape_.head_dim, shape_.heads, &key_}};
}

Values QueryKeyNorm::forward(Values values, Context& context, Saved& saved) {
  at::Tensor packed = std::move(values[0]);
  const int64_t whole = width() + shape_.kv_heads * shape_.head_dim;
  TWOBP_CHECK(packed.dim() == 3 && packed.size(2) == whole, "the norm of queries and keys ", query_.name(),
              " takes (batch, sequence, ", whole, "), got ", packed.sizes());
  TWOBP_CHECK(packed.scalar_type() == dtype_, "the norm of queries and keys ", query_.name(), " has dtype ",
              c10::toString(dtype_), ", got ", c10::toString(packed.scalar_type()));
  packed = own_even_rows(std::move(packed));
  at::Tensor before = as_matrix(packed).narrow(1, 0, width()).clone(at::MemoryFormat::Contiguous);
  const int64_t rows = before.size(0);
  const std::vector<Part> both = parts();
  const int64_t norms = both[1].first_norm + both[1].count;
  at::Tensor rstd = at::empty({norms * rows}, query_.value.options());  // by part, then by row
  for (const Part& part : both) {
    const at::Tensor gain = part.gain->gain();
    at::Tensor scales = rstd.narrow(0, part.first_norm * rows, part.count * rows);
    if (by_operators(packed)) {
      at::Tensor x = norms_of(before, part.first, part.count, part.cols).reshape({-1, part.cols});
      at::Tensor y = at::empty_like(x);
      operators::rms_norm_forward(x, gain, eps_, y, scales);
      norms_of(as_matrix(packed), part.first, part.count, part.cols).copy_(y.view({rows, part.count, part.cols}));
      continue;
    }
    dispatch_float(dtype_, "QueryKeyNorm", [&](auto zero) {
      using S = decltype(zero);
      const S* from = numbers<S>(before) + part.first;
      S* to = mutable_numbers<S>(packed) + part.first;
      const auto* weight = numbers<Compute<S>>(gain);
      auto* scale = mutable_numbers<Compute<S>>(scales);
      const int64_t stride = row_stride(packed);
      for_rows(rows, part.count * part.cols, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          kernels<S>().rms_norm_forward(from + r * width(), weight, to + r * stride, scale + r * part.count, part.count,
                                        part.cols, eps_);
        }
      });
    });
  }
  if (context.keeps()) {
    saved.keep_until_p1(std::move(before));
    saved.keep_until_p1(std::move(rstd));
  }
  return {std::move(packed)};
}

Values QueryKeyNorm::backward_p1(Values values, Context&, Saved& saved) {
  const at::Tensor before = saved.take_p1(0);
  const at::Tensor rstd = saved.take_p1(1);
  const int64_t rows = before.size(0);
  TWOBP_CHECK(values[0].numel() == rows * (width() + shape_.kv_heads * shape_.head_dim), "the gradient ",
              values[0].sizes(), " does not fit the output of the norm of queries and keys ", query_.name());
  at::Tensor dx = own_even_rows(std::move(values[0]));
  const int64_t blocks = (rows + kQueryKeyBlockRows - 1) / kQueryKeyBlockRows;
  for (const Part& part : parts()) {
    const at::Tensor gain = part.gain->gain();
    const at::Tensor scales = rstd.narrow(0, part.first_norm * rows, part.count * rows);
    at::Tensor dgain;
    if (by_operators(dx)) {
      const at::Tensor x = norms_of(before, part.first, part.count, part.cols).reshape({-1, part.cols});
      const at::Tensor there = norms_of(as_matrix(dx), part.first, part.count, part.cols);
      const at::Tensor dy = there.reshape({-1, part.cols});
      at::Tensor to = at::empty_like(dy);
      dgain = operators::rms_norm_backward(dy, x, gain, scales, to);
      there.copy_(to.view(there.sizes()));
    } else {
      const at::Tensor sums = at::zeros({blocks, part.cols}, gain.options());
      dispatch_float(dtype_, "QueryKeyNorm", [&](auto zero) {
        using S = decltype(zero);
        const S* from = numbers<S>(before) + part.first;
        S* to = mutable_numbers<S>(dx) + part.first;
        const auto* weight = numbers<Compute<S>>(gain);
        const auto* scale = numbers<Compute<S>>(scales);
        auto* sum = mutable_numbers<Compute<S>>(sums);
        const int64_t stride = row_stride(dx);
        at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
          for (int64_t r = begin * kQueryKeyBlockRows; r < std::min(rows, end * kQueryKeyBlockRows); ++r) {
            kernels<S>().rms_norm_backward(to + r * stride, from + r * width(), weight, scale + r * part.count,
                                           to + r * stride, sum + r / kQueryKeyBlockRows * part.cols, part.count,
                                           part.cols);
          }
        });
      });
      dgain = sums.sum(0);
    }
    if (part.gain->trainable()) part.gain->grad_to_add().add_(dgain);
  }
  return {std::move(dx)};
}

void QueryKeyNorm::collect_parameters(std::vector<Parameter*>& parameters) {
  parameters.push_back(&query_);
  parameters.push_back(&key_);
}

}  // namespace twobp
