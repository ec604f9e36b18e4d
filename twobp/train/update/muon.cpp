#include "twobp/train/update/muon.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

namespace twobp {
namespace {

using Matrices = std::vector<const MuonMatrix*>;

// A GPU's products are batched, which hides the cost of launching them, up to this size. Those of a CPU are
// not: MKL adds in another order for a batch of one than for more, and the bits must not depend on how many
// matrices a stage has.
constexpr int64_t kBatchNumbers = 1 << 26;

int64_t batch_of(const at::Tensor& matrix) {
  return matrix.is_cpu() ? 1 : std::max<int64_t>(1, kBatchNumbers / matrix.numel());
}

// The iteration bears rounding, so GPUs take bfloat16. That saves nothing on most CPUs.
at::ScalarType type_for(const at::Tensor& matrix) {
  return matrix.is_cpu() ? matrix.scalar_type() : at::kBFloat16;
}

// The matrix or its transpose, with no more rows than columns.
at::Tensor wide(const at::Tensor& matrix) {
  return matrix.size(0) > matrix.size(1) ? matrix.t() : matrix;
}

void step_batch(const Matrices& batch, const MuonStep& step) {
  const at::Tensor& first = batch.front()->value;
  const at::Tensor sample = wide(first);
  at::Tensor updates = at::empty({static_cast<int64_t>(batch.size()), sample.size(0), sample.size(1)},
                                 first.options().dtype(type_for(first)));
  for (size_t i = 0; i < batch.size(); ++i) {
    const auto& [value, grad, momentum] = *batch[i];
    momentum.lerp_(grad, 1 - step.momentum);
    updates[static_cast<int64_t>(i)].copy_(wide(grad.lerp(momentum, step.momentum)));
  }
  updates = orthogonalized(std::move(updates));
  const double scale = 0.2 * std::sqrt(static_cast<double>(sample.size(1)));
  for (size_t i = 0; i < batch.size(); ++i) {
    at::Tensor value = wide(batch[i]->value);
    value.mul_(1 - step.lr * step.weight_decay);
    value.add_(updates[static_cast<int64_t>(i)], -step.lr * scale);
  }
}

}  // namespace

at::Tensor orthogonalized(at::Tensor x) {
  constexpr int kSteps = 5;
  constexpr double kA = 3.4445;
  constexpr double kB = -4.7750;
  constexpr double kC = 2.0315;
  constexpr double kLeastNorm = 1e-7;
  // The Frobenius norm bounds the largest singular value, which must be at most 1.
  x.div_(at::linalg_vector_norm(x, 2, at::IntArrayRef({1, 2}), /*keepdim=*/true).clamp_min_(kLeastNorm));
  for (int i = 0; i < kSteps; ++i) {  // X <- a X + (b X X^T + c (X X^T)^2) X
    const at::Tensor gram = at::bmm(x, x.mT());
    const at::Tensor polynomial = at::baddbmm(gram, gram, gram, kB, kC);
    x = at::baddbmm(x, polynomial, x, kA, 1);
  }
  return x;
}

void muon_step(const std::vector<MuonMatrix>& matrices, const MuonStep& step) {
  std::map<std::pair<int64_t, int64_t>, Matrices> by_shape;
  for (const MuonMatrix& matrix : matrices) {
    const at::Tensor shape = wide(matrix.value);
    Matrices& batch = by_shape[{shape.size(0), shape.size(1)}];
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
