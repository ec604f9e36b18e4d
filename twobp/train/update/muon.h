// Muon, for matrices of hidden layers: a step along the momentum, made orthogonal (K. Jordan et al., "Muon: An
// optimizer for hidden layers in neural networks", 2024). The size of a step is matched to AdamW's, so that both share
// a learning rate (J. Liu et al., arXiv 2502.16982, section 2.2). With gradient G, momentum B, weight W of (m, n) and
// mu = momentum:
//   B <- mu B + (1 - mu) G
//   U  = (1 - mu) G + mu B                                       (Nesterov)
//   W <- (1 - lr decay) W - lr 0.2 sqrt(max(m, n)) orthogonalized(U)
// as in torch.optim.Muon with adjust_lr_fn="match_rms_adamw".
#pragma once

#include <vector>

#include <ATen/ATen.h>

#include "twobp/nn/parameter.h"

namespace twobp {

struct MuonMatrix {
  at::Tensor value, grad, momentum;  // (m, n), or (groups, m / groups, n), of one dtype
  at::ScalarType type;               // of the iteration
};

struct MuonStep {
  double lr = 0;
  double weight_decay = 0;
  double momentum = 0;
};

// One step for all matrices.
void muon_step(const std::vector<MuonMatrix>& matrices, const MuonStep& step);

// For each of a batch of matrices (batch, m, n), m <= n, with singular value decomposition U S V: a matrix close to U
// V, whose singular values are about 0.7 to 1.2. Five steps of the Newton-Schulz iteration with Jordan's coefficients,
// in `type`. Overwrites its argument.
at::Tensor orthogonalized(at::Tensor matrices, at::ScalarType type);

// A number in proportion to the time of a step for the parameter's projections.
int64_t muon_work(const Parameter& parameter);

}  // namespace twobp
