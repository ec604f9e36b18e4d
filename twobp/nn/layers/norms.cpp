#include "twobp/nn/layers/norms.h"

#include <algorithm>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/kernels/rows/operators.h"
#include "twobp/nn/kernels/rows/row_kernels.h"
#include "twobp/nn/kernels/rows/row_operations.h"

namespace twobp {
namespace {

// The parameters' gradients are summed over blocks of this many rows, then over the blocks. The sum is the same for any
// thread count.
constexpr int64_t kGainRows = 64;

// The number of rows that fit into the first-level cache together with the results computed from them.
int64_t cached_rows(int64_t cols) {
  return std::clamp<int64_t>(2048 / cols, 1, kGainRows);
}

}  // namespace

LayerNormRows::LayerNormRows(const std::string& name, int64_t dim, double eps, at::ScalarType dtype)
    : name_(name),
      gain_({{name + ".weight", dim}}, {dim}, compute_type(dtype), 0, 1),
      bias_({{name + ".bias", dim}}, {dim}, compute_type(dtype), 0),
      dtype_(dtype),
      eps_(eps) {}

void LayerNormRows::check(const at::Tensor& x) const {
  TWOBP_CHECK(x.dim() > 0 && x.size(-1) == dim(), "LayerNorm ", name_, " takes (..., ", dim(), "), got ", x.sizes());
  TWOBP_CHECK(x.scalar_type() == dtype_, "LayerNorm ", name_, " has dtype ", c10::toString(dtype_), ", got ",
              c10::toString(x.scalar_type()));
}

at::Tensor LayerNormRows::forward(const at::Tensor& x, at::Tensor& y, const Rows& before, const Rows& after) const {
  const int64_t cols = dim();
  const int64_t rows = x.numel() / cols;
  at::Tensor statistics = at::empty({2, rows}, gain_.value.options());
  if (by_operators(x)) {
    if (before) before(0, rows);
    operators::layer_norm_forward(x, gain_.value, bias_.value, eps_, y, statistics);
    if (after) after(0, rows);
    return statistics;
  }
  dispatch_float(dtype_, "LayerNorm", [&](auto zero) {
    using S = decltype(zero);
    const S* from = numbers<S>(x);
    const auto* gain = numbers<Compute<S>>(gain_.value);
    const auto* bias = numbers<Compute<S>>(bias_.value);
    S* to = mutable_numbers<S>(y);
    auto* mean = mutable_numbers<Compute<S>>(statistics);
    auto* rstd = mean + rows;
    for_rows(rows, cols, [&](int64_t first, int64_t last) {
      for (int64_t begin = first; begin < last;) {
        const int64_t end = std::min(last, begin + cached_rows(cols));
        if (before) before(begin, end);
        encoder_kernels<S>().layer_norm_forward(from + begin * cols, gain, bias, to + begin * cols, mean + begin,
                                                rstd + begin, end - begin, cols, eps_);
        if (after) after(begin, end);
        begin = end;
      }
    });
  });
  return statistics;
}

void LayerNormRows::backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& statistics, at::Tensor& dx,
                             const Rows& before, const Rows& after) {
  at::Tensor sums;  // of gain and bias
  if (by_operators(x)) {
    const int64_t rows = x.numel() / dim();
    if (before) before(0, rows);
    sums = operators::layer_norm_backward(dy, x, gain_.value, statistics, dx);
    if (after) after(0, rows);
  } else {
    sums = backward_rows(dy, x, statistics, dx, before, after);
  }
  if (gain_.trainable()) gain_.grad_to_add().add_(sums[0]);
  if (bias_.trainable()) bias_.grad_to_add().add_(sums[1]);
}

at::Tensor LayerNormRows::backward_rows(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& statistics,
                                        at::Tensor& dx, const Rows& before, const Rows& after) const {
  const int64_t cols = dim();
  const int64_t rows = x.numel() / cols;
  const int64_t blocks = (rows + kGainRows - 1) / kGainRows;
  const at::Tensor sums = at::zeros({2, blocks, cols}, gain_.value.options());
  dispatch_float(dtype_, "LayerNorm", [&](auto zero) {
    using S = decltype(zero);
    const S* from = numbers<S>(x);
    const S* gradient = numbers<S>(dy);
    const auto* gain = numbers<Compute<S>>(gain_.value);
    const auto* mean = numbers<Compute<S>>(statistics);
    const auto* rstd = mean + rows;
    S* to = mutable_numbers<S>(dx);
    auto* dgain = mutable_numbers<Compute<S>>(sums);
    auto* dbias = dgain + blocks * cols;
    at::parallel_for(0, blocks, 1, [&](int64_t first, int64_t last) {
      for (int64_t block = first; block < last; ++block) {
        const int64_t block_end = std::min(rows, (block + 1) * kGainRows);
        for (int64_t begin = block * kGainRows; begin < block_end;) {
          const int64_t end = std::min(block_end, begin + cached_rows(cols));
          if (before) before(begin, end);
          encoder_kernels<S>().layer_norm_backward(gradient + begin * cols, from + begin * cols, gain, mean + begin,
                                                   rstd + begin, to + begin * cols, dgain + block * cols,
                                                   dbias + block * cols, end - begin, cols);
          if (after) after(begin, end);
          begin = end;
        }
      }
    });
  });
  return sums.sum(1);
}

void LayerNormRows::collect_parameters(std::vector<Parameter*>& parameters) {
  parameters.push_back(&gain_);
  parameters.push_back(&bias_);
}

Values LayerNorm::forward(Values values, Context& context, Saved& saved) {
  at::Tensor x = as_contiguous(std::move(values[0]));
  norm_.check(x);
  at::Tensor y = at::empty(x.sizes(), x.options());
  at::Tensor statistics = norm_.forward(x, y);
  if (context.keeps()) {
    saved.keep_until_p1(std::move(x));
    saved.keep_until_p1(std::move(statistics));
  }
  return {std::move(y)};
}

Values LayerNorm::backward_p1(Values values, Context&, Saved& saved) {
  const at::Tensor x = saved.take_p1(0);
  const at::Tensor statistics = saved.take_p1(1);
  at::Tensor dy = as_contiguous(std::move(values[0]));
  TWOBP_CHECK(dy.sizes() == x.sizes(), "the gradient ", dy.sizes(), " does not fit the output of LayerNorm ",
              norm_.name(), ", ", x.sizes());
  at::Tensor dx = exclusively_owned(dy) ? dy : at::empty(x.sizes(), x.options());
  norm_.backward(dy, x, statistics, dx);
  return {std::move(dx)};
}

void LayerNorm::collect_parameters(std::vector<Parameter*>& parameters) {
  norm_.collect_parameters(parameters);
}

RmsGain::RmsGain(std::string name, int64_t dim, at::ScalarType dtype, GainForm form)
    : Parameter({{std::move(name), dim}}, {dim}, compute_type(dtype), 0, form == GainForm::kWeight ? 1 : 0),
      form_(form) {}

RmsNorm::RmsNorm(std::string name, int64_t dim, double eps, at::ScalarType dtype, GainForm form)
    : gain_(std::move(name), dim, dtype, form), dtype_(dtype), eps_(eps) {}

Values RmsNorm::forward(Values values, Context& context, Saved& saved) {
  at::Tensor x = as_contiguous(std::move(values[0]));
  const int64_t cols = x.size(-1);
  TWOBP_CHECK(cols == gain_.value.numel(), "RmsNorm ", gain_.name(), " takes (..., ", gain_.value.numel(), "), got ",
              x.sizes());
  TWOBP_CHECK(x.scalar_type() == dtype_, "RmsNorm ", gain_.name(), " has dtype ", c10::toString(dtype_), ", got ",
              c10::toString(x.scalar_type()));
  auto [y, rstd] = rms_norm(x, gain_.gain(), eps_);
  if (context.keeps()) {
    saved.keep_until_p1(std::move(x));
    saved.keep_until_p1(std::move(rstd));
  }
  return {std::move(y)};
}

Values RmsNorm::backward_p1(Values values, Context&, Saved& saved) {
  const at::Tensor x = saved.take_p1(0);
  const at::Tensor rstd = saved.take_p1(1);
  at::Tensor dy = as_contiguous(std::move(values[0]));
  TWOBP_CHECK(dy.sizes() == x.sizes(), "the gradient ", dy.sizes(), " does not fit the output of RmsNorm ",
              gain_.name(), ", ", x.sizes());
  at::Tensor dx = exclusively_owned(dy) ? dy : at::empty(x.sizes(), x.options());
  const at::Tensor dgain = rms_norm_backward(dy, x, gain_.gain(), rstd, dx);
  if (gain_.trainable()) gain_.grad_to_add().add_(dgain);
  return {std::move(dx)};
}

void RmsNorm::collect_parameters(std::vector<Parameter*>& parameters) {
  parameters.push_back(&gain_);
}

Values AddNorm::forward(Values values, Context& context, Saved& saved) {
  const at::Tensor x = as_contiguous(std::move(values[0]));
  norm_.check(x);
  Values branch = branch_->forward({x}, context, saved.child(0));
  TWOBP_CHECK(branch[0].sizes() == x.sizes(), "the branch of AddNorm ", norm_.name(), " returns ", branch[0].sizes(),
              " for an input ", x.sizes(), ", so the two cannot be added");
  at::Tensor from = as_contiguous(std::move(branch[0]));
  at::Tensor sum = exclusively_owned(from) ? from : at::empty_like(x);
  at::Tensor y = at::empty_like(x);
  const DropoutMask mask = rate_.mask(context);
  at::Tensor statistics = norm_.forward(
      sum, y, [&](int64_t begin, int64_t end) { dropout_rows(from, x, sum, norm_.dim(), mask, begin, end); });
  from.reset();
  if (context.keeps()) {
    saved.keep_until_p1(std::move(sum));
    saved.keep_until_p1(std::move(statistics));
  }
  return {std::move(y)};
}

Values AddNorm::backward_p1(Values values, Context& context, Saved& saved) {
  at::Tensor sum = saved.take_p1(0);
  at::Tensor statistics = saved.take_p1(1);
  at::Tensor dy = as_contiguous(std::move(values[0]));
  TWOBP_CHECK(dy.sizes() == sum.sizes(), "the gradient ", dy.sizes(), " does not fit the output of AddNorm ",
              norm_.name(), ", ", sum.sizes());
  const bool drops = rate_.active(context);
  at::Tensor dsum = exclusively_owned(dy) ? dy : at::empty_like(dy);
  at::Tensor branch = dsum;  // dL/d(branch's output)
  if (drops) branch = exclusively_owned(sum) ? sum : at::empty_like(sum);
  const DropoutMask mask = rate_.mask(context);
  LayerNormRows::Rows drop_again;
  if (drops) {
    drop_again = [&](int64_t begin, int64_t end) { dropout_rows(dsum, {}, branch, norm_.dim(), mask, begin, end); };
  }
  norm_.backward(dy, sum, statistics, dsum, {}, drop_again);
  sum.reset();
  dy.reset();
  statistics.reset();
  Values dx = branch_->backward_p1({std::move(branch)}, context, saved.child(0));
  dx[0].add_(dsum);
  return dx;
}

void AddNorm::collect_p2(Saved& saved, std::vector<P2Unit>& units) {
  branch_->collect_p2(saved.child(0), units);
}

void AddNorm::collect_parameters(std::vector<Parameter*>& parameters) {
  branch_->collect_parameters(parameters);
  norm_.collect_parameters(parameters);
}

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
  const at::Tensor after = as_matrix(packed);
  for (const Part& part : both) {
    at::Tensor scales = rstd.narrow(0, part.first_norm * rows, part.count * rows);
    at::Tensor y = after.narrow(1, part.first, part.count * part.cols);
    rms_norm_rows(before.narrow(1, part.first, part.count * part.cols), part.gain->gain(), eps_, y, scales);
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
  for (const Part& part : parts()) {
    const at::Tensor scales = rstd.narrow(0, part.first_norm * rows, part.count * rows);
    at::Tensor there = as_matrix(dx).narrow(1, part.first, part.count * part.cols);
    const at::Tensor x = before.narrow(1, part.first, part.count * part.cols);
    const at::Tensor dgain = rms_norm_rows_backward(there, x, part.gain->gain(), scales, there);
    if (part.gain->trainable()) part.gain->grad_to_add().add_(dgain);
  }
  return {std::move(dx)};
}

void QueryKeyNorm::collect_parameters(std::vector<Parameter*>& parameters) {
  parameters.push_back(&query_);
  parameters.push_back(&key_);
}

}  // namespace twobp
