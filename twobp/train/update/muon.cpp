#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>
#include <utility>

#include "twobp/nn/kernels/products/rows.h"
#include "twobp/train/update/optimizer.h"

namespace twobp {
namespace {

using Matrices = std::vector<const MuonMatrix*>;

// A GPU's products are batched, which hides the cost of launching them, up to this size. Those of a CPU are not: MKL
// adds in another order for a batch of one than for more, and the bits must not depend on how many matrices a stage
// has.
constexpr int64_t kBatchNumbers = 1 << 26;

int64_t batch_of(const at::Tensor& matrix) {
  return matrix.is_cpu() ? 1 : std::max<int64_t>(1, kBatchNumbers / matrix.numel());
}

struct MatrixShape {
  int64_t rows, columns;

  bool tall() const { return rows > columns; }
  int64_t shorter() const { return std::min(rows, columns); }
  int64_t longer() const { return std::max(rows, columns); }
};

MatrixShape shape_of(const at::Tensor& matrix) {
  return {matrix.numel() / matrix.size(-1), matrix.size(-1)};
}

// The matrix or its transpose, with no more rows than columns.
at::Tensor wide(const at::Tensor& matrix) {
  return shape_of(matrix).tall() ? matrix.flatten(0, -2).t() : matrix.flatten(0, -2);
}

// The inverse, as a matrix of the given sizes.
at::Tensor from_wide(const at::Tensor& wide, at::IntArrayRef sizes, bool tall) {
  const at::Tensor matrix = tall ? wide.t() : wide;
  return sizes.size() == 2 ? matrix : matrix.unflatten(0, sizes.slice(0, sizes.size() - 1));
}

// a b^T, or beta y + alpha a b^T, if that is symmetric: a, b (batch, m, n), y (batch, m, m). On a CPU the part above
// the diagonal's blocks is copied from below, which saves up to half of the product.
at::Tensor symmetric_product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& y = {}, double beta = 0,
                             double alpha = 1) {
  constexpr int64_t kBlock = 128;  // rows; with fewer, the products become slower than what they save
  const int64_t rows = a.size(1);
  if (!a.is_cpu() || rows < 2 * kBlock)
    return y.defined() ? at::baddbmm(y, a, b.mT(), beta, alpha) : at::bmm(a, b.mT());
  at::Tensor result = at::empty({a.size(0), rows, rows}, a.options());
  for (int64_t i = 0; i < a.size(0); ++i) {  // products of batches would copy a part of a result
    for (int64_t first = 0; first < rows; first += kBlock) {
      const int64_t count = std::min(kBlock, rows - first);
      const int64_t end = first + count;
      at::Tensor out = result[i].narrow(0, first, count).narrow(1, 0, end);
      const at::Tensor left = a[i].narrow(0, first, count);
      const at::Tensor right = b[i].narrow(0, 0, end).t();
      if (y.defined()) {
        at::addmm_out(out, y[i].narrow(0, first, count).narrow(1, 0, end), left, right, beta, alpha);
      } else {
        at::mm_out(out, left, right);
      }
      result[i].narrow(0, 0, first).narrow(1, first, count).copy_(out.narrow(1, 0, first).t());
    }
  }
  return result;
}

// `steps` iterations X <- a X + (b X X^T + c (X X^T)^2) X. Several are iterations of G = X X^T, G <- P G P with P = a +
// b G + c G^2, and one product of X by all the P, which all commute.
at::Tensor iterate(const at::Tensor& x, int steps) {
  constexpr double kA = 3.4445;
  constexpr double kB = -4.7750;
  constexpr double kC = 2.0315;
  at::Tensor gram = symmetric_product(x, x);
  at::Tensor all;
  for (int i = 0; i < steps; ++i) {
    const at::Tensor polynomial = symmetric_product(gram, gram, gram, kB, kC);
    if (steps == 1) return at::baddbmm(x, polynomial, x, kA, 1);
    polynomial.diagonal(0, 1, 2).add_(kA);
    all = i == 0 ? polynomial : at::bmm(polynomial, all);
    if (i + 1 < steps) gram = symmetric_product(at::bmm(polynomial, gram), polynomial);
  }
  return at::bmm(all, x);
}

void step_batch(const Matrices& batch, const MuonStep& step) {
  const at::Tensor& first = batch.front()->value;
  const MatrixShape shape = shape_of(first);
  at::Tensor updates =
      at::empty({static_cast<int64_t>(batch.size()), shape.shorter(), shape.longer()}, first.options());
  for (size_t i = 0; i < batch.size(); ++i) {
    const auto& [value, grad, momentum, type] = *batch[i];
    momentum.lerp_(grad, 1 - step.momentum);
    updates[static_cast<int64_t>(i)].copy_(wide(grad.lerp(momentum, step.momentum)));
  }
  updates = orthogonalized(std::move(updates), batch.front()->type);
  const double scale = 0.2 * std::sqrt(static_cast<double>(shape.longer()));
  for (size_t i = 0; i < batch.size(); ++i) {
    const at::Tensor& value = batch[i]->value;
    value.mul_(1 - step.lr * step.weight_decay);
    const at::Tensor update = updates[static_cast<int64_t>(i)];
    value.add_(from_wide(update, value.sizes(), shape_of(value).tall()), -step.lr * scale);
  }
}

}  // namespace

at::Tensor orthogonalized(at::Tensor x, at::ScalarType type) {
  constexpr double kLeastNorm = 1e-7;
  // The Frobenius norm bounds the largest singular value, which must be at most 1.
  x.div_(at::linalg_vector_norm(x, 2, at::IntArrayRef({1, 2}), /*keepdim=*/true).clamp_min_(kLeastNorm));
  x = x.to(type);
  // Of a wide matrix, the products by X cost most. Five iterations of G alone would magnify G's rounding ten times as
  // much as those of X do, but three and two do not; in reduced precision they would.
  const bool by_gram = compute_type(type) == type && x.size(2) >= 2 * x.size(1);
  const std::vector<int> rounds = by_gram ? std::vector{3, 2} : std::vector{1, 1, 1, 1, 1};
  for (const int steps : rounds) x = iterate(x, steps);
  return x;
}

int64_t muon_work(const Parameter& parameter) {
  int64_t work = 0;
  const at::Tensor sizes = at::empty(parameter.sizes(), at::TensorOptions().device(at::kMeta));
  for (const at::Tensor& one : parameter.projections_of(sizes)) work += one.numel() * shape_of(one).shorter();
  return work;
}

void muon_step(const std::vector<MuonMatrix>& matrices, const MuonStep& step) {
  std::map<std::tuple<int64_t, int64_t, at::ScalarType>, Matrices> by_shape;
  for (const MuonMatrix& matrix : matrices) {
    const MatrixShape shape = shape_of(matrix.value);
    Matrices& batch = by_shape[{shape.shorter(), shape.longer(), matrix.type}];
    batch.push_back(&matrix);
    if (static_cast<int64_t>(batch.size()) < batch_of(matrix.value)) continue;
    step_batch(batch, step);
    batch.clear();
  }
  for (const auto& [shape, batch] : by_shape) {
    if (!batch.empty()) step_batch(batch, step);
  }
}

}  // namespace twobp
