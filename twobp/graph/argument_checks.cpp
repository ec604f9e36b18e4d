#include <algorithm>
#include <cmath>
#include <optional>

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>

#include "twobp/core/check.h"
#include "twobp/graph/arguments.h"

namespace twobp::graph {
namespace {

using Call = CheckedCall;

bool is_reduced(const at::Tensor& x) {
  return at::isReducedFloatingType(x.scalar_type());
}

// Statistics, gains and biases are of x's dtype, or all of float32 for an x of 16 bits.
void require_vectors(const Call& call, std::initializer_list<size_t> which, const at::Tensor& x, int64_t count) {
  std::optional<at::ScalarType> dtype;
  for (const size_t i : which) {
    if (!call.has(i)) continue;
    call.require_numel(i, count);
    const at::ScalarType own = call.tensor(i).scalar_type();
    TWOBP_CHECK(own == x.scalar_type() || (own == at::kFloat && is_reduced(x)), "argument ", i, " is of ", own,
                " for numbers of ", x.scalar_type());
    if (!dtype) dtype = own;
    call.require_dtype(i, *dtype);
  }
}

int64_t channels(const at::Tensor& x) {
  TWOBP_CHECK(x.dim() >= 2 && x.is_floating_point(),
              "argument 0 must be floating-point numbers (batch, channels, ...), not ", x.sizes(), " ",
              x.scalar_type());
  return x.size(1);
}

// x, weight, bias, running mean and variance, whether they are read.
void batch_norm(Call& call, bool running) {
  const at::Tensor& x = call.tensor(0);
  require_vectors(call, {1, 2}, x, channels(x));
  require_vectors(call, {3, 4}, x, channels(x));
  TWOBP_CHECK(call.has(3) == call.has(4) && (call.has(3) || !running),
              "arguments 3 and 4, the running mean and variance, are not both given");
  call.make_contiguous({1, 2, 3, 4});
}

void check_batch_norm(Call& call) {
  batch_norm(call, !call.flag(5));
}

void check_batch_norm_without_training(Call& call) {
  batch_norm(call, true);
}

// x, weight, bias, training
void check_batch_norm_legit(Call& call) {
  const at::Tensor& x = call.tensor(0);
  require_vectors(call, {1, 2}, x, channels(x));
  TWOBP_CHECK(call.flag(3), "argument 3 must be true: there are no running statistics");
  call.make_contiguous({1, 2});
}

// dy, x, weight, running mean, running variance, saved mean, saved 1 / deviation, train
void check_batch_norm_backward(Call& call) {
  const at::Tensor& x = call.tensor(1);
  call.require_same(0, 1);
  require_vectors(call, {2}, x, channels(x));
  if (call.flag(7)) {
    require_vectors(call, {5, 6}, x, channels(x));
    TWOBP_CHECK(call.has(5) && call.has(6), "arguments 5 and 6, the statistics of the micro-batch, are missing");
  } else {
    require_vectors(call, {3, 4}, x, channels(x));
    TWOBP_CHECK(call.has(3) && call.has(4), "arguments 3 and 4, the running mean and variance, are missing");
  }
  call.make_contiguous({2, 3, 4, 5, 6});
}

// The product of the dimensions that are normalized, at the end of x.
int64_t normalized(const at::Tensor& x, const std::vector<int64_t>& shape) {
  const auto dims = static_cast<size_t>(x.dim());
  TWOBP_CHECK(shape.size() <= dims && x.sizes().slice(dims - shape.size()) == at::IntArrayRef(shape),
              "the numbers have the sizes ", x.sizes(), ", which do not end with ", at::IntArrayRef(shape));
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

// dy, x, normalized shape, mean, 1 / deviation, weight, bias
void check_layer_norm_backward(Call& call) {
  const at::Tensor& x = call.tensor(1);
  call.require_same(0, 1);
  const int64_t count = normalized(x, call.integers(2));
  require_vectors(call, {3, 4}, x, count == 0 ? call.tensor(3).numel() : x.numel() / count);
  require_vectors(call, {5, 6}, x, count);
  call.make_contiguous({0, 1, 3, 4, 5, 6});
}

// What of x, its batch, channels and other elements, and groups the kernel relies on. Arguments from `i`.
void group_norm(const Call& call, size_t x, size_t i) {
  const int64_t batch = call.integer(i), width = call.integer(i + 1), rest = call.integer(i + 2),
                groups = call.integer(i + 3);
  TWOBP_CHECK(batch >= 0 && width > 0 && rest >= 0 && groups > 0 && width % groups == 0, "argument ", i + 3, " is ",
              groups, " groups of ", width, " channels");
  const at::Tensor& numbers = call.tensor(x);
  TWOBP_CHECK(numbers.dim() >= 2 && numbers.size(0) == batch && numbers.size(1) == width &&
                  numbers.numel() / (batch * width) == rest,
              "argument ", x, " has the sizes ", numbers.sizes(), ", not ", batch, " samples of ", width,
              " channels of ", rest, " elements");
}

void check_group_norm(Call& call) {
  if (call.integer(3) == 0 || call.tensor(0).numel() == 0) return;
  group_norm(call, 0, 3);
  require_vectors(call, {1, 2}, call.tensor(0), call.integer(4));
  call.make_contiguous({1, 2});
}

// dy, x, mean, 1 / deviation, weight
void check_group_norm_backward(Call& call) {
  call.require_same(0, 1);
  TWOBP_CHECK(call.tensor(1).numel() > 0, "argument 1 is empty");
  group_norm(call, 1, 5);
  require_vectors(call, {2, 3}, call.tensor(1), call.integer(5) * call.integer(8));
  require_vectors(call, {4}, call.tensor(1), call.integer(6));
  call.make_contiguous({2, 3, 4});
}

// v, g, dim: g has one element for each slice of v along dim.
void weight_norm(Call& call, size_t v, int64_t dim) {
  const at::Tensor& x = call.tensor(v);
  TWOBP_CHECK(x.dim() > 0 && (dim == 0 || dim == x.dim() - 1), "dimension ", dim, " must be the first or last of ",
              x.sizes());
  std::vector<int64_t> sizes(static_cast<size_t>(x.dim()), 1);
  sizes[static_cast<size_t>(dim)] = x.size(dim);
  call.require_sizes(v + 1, sizes);
  call.require_dtype(v + 1, x.scalar_type());
  call.make_contiguous({v, v + 1});
}

void check_weight_norm(Call& call) {
  weight_norm(call, 0, call.integer(2));
}

void check_weight_norm_backward(Call& call) {
  call.require_same(0, 1);
  weight_norm(call, 1, call.integer(4));
  call.require_same_sizes(3, 2);
  call.require_dtype(3, is_reduced(call.tensor(1)) ? at::kFloat : call.tensor(1).scalar_type());
  call.make_contiguous({0, 3});
}

// q, k, v from `i` on, and the mask.
void attention(Call& call, size_t i, size_t mask) {
  const at::Tensor &q = call.tensor(i), &k = call.tensor(i + 1), &v = call.tensor(i + 2);
  const bool fits = q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && q.numel() > 0 && k.numel() > 0 &&
                    q.is_floating_point() && k.size(0) == q.size(0) && q.size(1) % k.size(1) == 0 &&
                    k.size(3) == q.size(3) && v.sizes() == k.sizes() && k.scalar_type() == q.scalar_type() &&
                    v.scalar_type() == q.scalar_type();
  TWOBP_CHECK(fits,
              "attention takes q (batch, heads, positions, n) and k, v (batch, kv_heads, keys, n) of one dtype, not ",
              q.sizes(), ", ", k.sizes(), " and ", v.sizes());
  call.make_last_dense({i, i + 1, i + 2});
  if (!call.has(mask)) return;
  const at::Tensor& m = call.tensor(mask);
  const std::vector<int64_t> whole{q.size(0), q.size(1), q.size(2), k.size(2)};
  const auto dims = static_cast<size_t>(m.dim());
  bool right = dims == 2 || dims == 4;
  for (size_t d = 0; right && d < dims; ++d)
    right = m.size(static_cast<int64_t>(d)) == 1 || m.size(static_cast<int64_t>(d)) == whole[d + 4 - dims];
  TWOBP_CHECK(right, "argument ", mask, ", the mask, has the sizes ", m.sizes(), ", which do not expand to ",
              at::IntArrayRef(whole));
  TWOBP_CHECK(m.scalar_type() == q.scalar_type() || (m.scalar_type() == at::kFloat && is_reduced(q)), "argument ", mask,
              ", the mask, is of ", m.scalar_type(), ", but must be of ", q.scalar_type());
}

void check_attention(Call& call) {
  attention(call, 0, 5);
}

// dout, q, k, v, out, log_sum_exp, dropout, causal, mask, scale
void check_attention_backward(Call& call) {
  attention(call, 1, 8);
  call.require_same(0, 1);
  call.require_same(4, 1);
  call.require_sizes(5, call.tensor(1).sizes().slice(0, 3));
  call.require_dtype(5, is_reduced(call.tensor(1)) ? at::kFloat : call.tensor(1).scalar_type());
  call.make_last_dense({0, 4});
}

template <int64_t spatial>
void check_average(Call& call) {
  call.require_same_outer(0, 1, spatial);
}

// dy, x, ..., and the indices into the last dimensions of x, the last argument
template <int64_t spatial>
void check_pooled_indices(Call& call) {
  const size_t last = call.size() - 1;
  call.require_same_outer(0, 1, spatial);
  call.require_same_sizes(last, 0);
  int64_t places = 1;
  for (int64_t d = 1; d <= spatial; ++d) places *= call.tensor(1).size(-d);
  call.require_indices(last, places);
}

// dy, x, padding
template <int64_t spatial>
void check_padded(Call& call) {
  const std::vector<int64_t> padding = call.integers(2);
  const at::Tensor& x = call.tensor(1);
  TWOBP_CHECK(padding.size() == 2 * spatial && (x.dim() == spatial + 1 || x.dim() == spatial + 2),
              "argument 1 has the sizes ", x.sizes(), " and argument 2 ", padding.size(),
              " numbers, but only the last ", spatial, " dimensions of some channels are padded");
  std::vector<int64_t> sizes = x.sizes().vec();
  for (size_t d = 0; d < spatial; ++d) {
    int64_t& size = sizes[sizes.size() - 1 - d];
    const bool overflow =
        __builtin_add_overflow(size, padding[2 * d], &size) || __builtin_add_overflow(size, padding[2 * d + 1], &size);
    TWOBP_CHECK(!overflow && padding[2 * d] > -(int64_t{1} << 40) && padding[2 * d + 1] > -(int64_t{1} << 40),
                "argument 2, the padding, is too large");
  }
  call.require_sizes(0, sizes);
  call.require_dtype(0, x.scalar_type());
}

// dy, sizes of x, dim, size, step
void check_unfold_backward(Call& call) {
  std::vector<int64_t> sizes = call.integers(1);
  const bool scalar = sizes.empty();  // is cut as one number
  if (scalar) sizes.push_back(1);
  const auto dims = static_cast<int64_t>(sizes.size());
  const int64_t dim = call.integer(2) < 0 ? call.integer(2) + dims : call.integer(2), size = call.integer(3),
                step = call.integer(4);
  TWOBP_CHECK(dim >= 0 && dim < dims && step > 0 && size >= 0 && size <= sizes[static_cast<size_t>(dim)],
              "no parts of ", size, " elements at steps of ", step, " along dimension ", dim, " of ",
              at::IntArrayRef(sizes));
  sizes[static_cast<size_t>(dim)] = (sizes[static_cast<size_t>(dim)] - size) / step + 1;
  sizes.push_back(size);
  if (scalar) sizes = {size};
  call.require_sizes(0, sizes);
}

// dy, y, dim
void check_softmax_backward(Call& call) {
  call.require_same(0, 1);
}

// x, target, weight
void check_cross_entropy_of_two(Call& call) {
  call.require_same_sizes(1, 0);
}

void check_cross_entropy_of_two_backward(Call& call) {
  call.require_same_sizes(2, 1);
}

// dy, x, target, weight, reduction, ignore, total weight
void check_nll_backward(Call& call) {
  const at::Tensor& x = call.tensor(1);
  TWOBP_CHECK(x.dim() > 0, "argument 1 has no dimension of classes");
  call.require_indices(2, x.size(x.dim() == 1 ? 0 : 1), call.integer(5));
}

// dy, ids, rows, padding, scale by frequency
void check_embedding_backward(Call& call) {
  if (call.flag(4)) call.require_indices(1, call.integer(2));
}

// x, grid, interpolation, padding; `i` is x
template <size_t i>
void check_grid_sampler(Call& call) {
  TWOBP_CHECK(
      call.integer(i + 2) >= 0 && call.integer(i + 2) <= 2 && call.integer(i + 3) >= 0 && call.integer(i + 3) <= 2,
      "arguments ", i + 2, " and ", i + 3, " must be in 0 to 2, modes of interpolation and padding");
  if (i == 0) return;
  std::vector<int64_t> sizes = call.tensor(i + 1).sizes().vec();
  TWOBP_CHECK(sizes.size() >= 3 && call.tensor(i).dim() == static_cast<int64_t>(sizes.size()), "argument ", i + 1,
              " is no grid");
  sizes.pop_back();
  sizes.insert(sizes.begin() + 1, call.tensor(i).size(1));
  call.require_sizes(0, sizes);
}

// dy, a, b, p, distances
void check_cdist_backward(Call& call) {
  const at::Tensor &a = call.tensor(1), &b = call.tensor(2);
  TWOBP_CHECK(call.number(3) >= 0 && a.dim() >= 2 && b.dim() >= 2 && a.size(-1) == b.size(-1) &&
                  a.scalar_type() == b.scalar_type(),
              "distances are between rows of one size, of norm 0 or more, not ", a.sizes(), " and ", b.sizes());
  const auto batch = [](const at::Tensor& t) { return t.sizes().slice(0, t.dim() - 2); };
  std::vector<int64_t> sizes = at::infer_size(batch(a), batch(b));  // throws unless one expands to the other
  sizes.insert(sizes.end(), {a.size(-2), b.size(-2)});
  call.require_sizes(0, sizes);
  call.require_same(4, 0);
  call.require_dtype(0, a.scalar_type());
}

// dy, x, p, distances
void check_pdist_backward(Call& call) {
  const at::Tensor& x = call.tensor(1);
  TWOBP_CHECK(x.dim() == 2 && call.number(2) >= 0, "argument 1 must be rows, not ", x.sizes(),
              ", and argument 2 a norm of 0 or more");
  const int64_t rows = x.size(0);
  call.require_sizes(0, {rows * (rows - 1) / 2});
  call.require_same(3, 0);
  call.require_dtype(0, x.scalar_type());
  call.make_contiguous({0, 1, 3});
}

// The kernel computes places in x from the factors, where they are given.
void check_factors(at::IntArrayRef from, at::IntArrayRef to, const std::optional<double>& height,
                   const std::optional<double>& width) {
  const std::optional<double> factors[] = {height, width};
  for (size_t d = 0; d < 2; ++d) {
    if (!factors[d]) continue;
    const double size = static_cast<double>(from[from.size() - 2 + d]) * *factors[d];
    TWOBP_CHECK(*factors[d] > 0 && std::abs(size - static_cast<double>(to[to.size() - 2 + d])) <= 1, "the factor ",
                *factors[d], " does not make ", to, " of ", from);
  }
}

// x, output sizes, align_corners, factors
void check_antialiased(Call& call) {
  const std::vector<int64_t> to = call.integers(1);
  if (to.size() != 2 || call.tensor(0).dim() != 4) return;  // refused by LibTorch
  check_factors(call.tensor(0).sizes(), to, call.maybe_number(3), call.maybe_number(4));
}

// dy, output sizes, input sizes, align_corners, factors
void check_antialiased_backward(Call& call) {
  const std::vector<int64_t> to = call.integers(1), from = call.integers(2);
  if (to.size() != 2 || from.size() != 4) return;  // refused by LibTorch
  check_factors(from, to, call.maybe_number(4), call.maybe_number(5));
}

// The kernel sorts a copy with x's own strides.
void check_median(Call& call) {
  call.make_contiguous({0});
}

struct Named {
  std::string_view name;
  ArgumentCheck check;
};

constexpr Named kChecks[] = {{"_adaptive_avg_pool2d_backward", &check_average<2>},
                             {"_adaptive_avg_pool3d_backward", &check_average<3>},
                             {"_cdist_backward", &check_cdist_backward},
                             {"_log_softmax_backward_data", &check_softmax_backward},
                             {"_native_batch_norm_legit.no_stats", &check_batch_norm_legit},
                             {"_native_batch_norm_legit_functional", &check_batch_norm},
                             {"_native_batch_norm_legit_no_training", &check_batch_norm_without_training},
                             {"_pdist_backward", &check_pdist_backward},
                             {"_scaled_dot_product_flash_attention_for_cpu", &check_attention},
                             {"_scaled_dot_product_flash_attention_for_cpu_backward", &check_attention_backward},
                             {"_softmax_backward_data", &check_softmax_backward},
                             {"_upsample_bicubic2d_aa", &check_antialiased},
                             {"_upsample_bicubic2d_aa_backward", &check_antialiased_backward},
                             {"_upsample_bilinear2d_aa", &check_antialiased},
                             {"_upsample_bilinear2d_aa_backward", &check_antialiased_backward},
                             {"_weight_norm_interface", &check_weight_norm},
                             {"_weight_norm_interface_backward", &check_weight_norm_backward},
                             {"adaptive_max_pool2d_backward", &check_pooled_indices<2>},
                             {"adaptive_max_pool3d_backward", &check_pooled_indices<3>},
                             {"avg_pool2d_backward", &check_average<2>},
                             {"avg_pool3d_backward", &check_average<3>},
                             {"binary_cross_entropy", &check_cross_entropy_of_two},
                             {"binary_cross_entropy_backward", &check_cross_entropy_of_two_backward},
                             {"embedding_dense_backward", &check_embedding_backward},
                             {"grid_sampler_2d", &check_grid_sampler<0>},
                             {"grid_sampler_2d_backward", &check_grid_sampler<1>},
                             {"grid_sampler_3d", &check_grid_sampler<0>},
                             {"grid_sampler_3d_backward", &check_grid_sampler<1>},
                             {"max_pool2d_with_indices_backward", &check_pooled_indices<2>},
                             {"max_pool3d_with_indices_backward", &check_pooled_indices<3>},
                             {"median.dim", &check_median},
                             {"native_batch_norm", &check_batch_norm},
                             {"native_batch_norm_backward", &check_batch_norm_backward},
                             {"native_group_norm", &check_group_norm},
                             {"native_group_norm_backward", &check_group_norm_backward},
                             {"native_layer_norm_backward", &check_layer_norm_backward},
                             {"nll_loss2d_backward", &check_nll_backward},
                             {"nll_loss_backward", &check_nll_backward},
                             {"reflection_pad1d_backward", &check_padded<1>},
                             {"reflection_pad2d_backward", &check_padded<2>},
                             {"reflection_pad3d_backward", &check_padded<3>},
                             {"replication_pad1d_backward", &check_padded<1>},
                             {"replication_pad2d_backward", &check_padded<2>},
                             {"replication_pad3d_backward", &check_padded<3>},
                             {"unfold_backward", &check_unfold_backward}};

}  // namespace

ArgumentCheck find_check(std::string_view name) {
  const auto* found =
      std::find_if(std::begin(kChecks), std::end(kChecks), [&](const Named& one) { return one.name == name; });
  return found == std::end(kChecks) ? nullptr : found->check;
}

}  // namespace twobp::graph
