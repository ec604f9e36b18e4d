// Mamba's layers in plain ATen operators, with the scan as a loop over positions, as a reference that autograd
// differentiates. Used in float64.
#pragma once

#include <vector>

#include "tests/nn/reference.h"
#include "twobp/nn/layers/mamba_mixer.h"

namespace twobp::test::reference {

// x (B, S, C), weight (C, 1, K), bias (C).
inline at::Tensor causal_conv1d(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const int64_t kernel = weight.size(2);
  const at::Tensor y = at::conv1d(x.transpose(1, 2), weight, bias, /*stride=*/1, /*padding=*/kernel - 1,
                                  /*dilation=*/1, /*groups=*/x.size(2));
  return at::silu(y.narrow(2, 0, x.size(1))).transpose(1, 2);
}

// x, raw, z (B, S, C); b, c (B, S, N); a_log (C, N); d, bias (C).
inline at::Tensor selective_scan(const at::Tensor& x, const at::Tensor& raw, const at::Tensor& b, const at::Tensor& c,
                                 const at::Tensor& z, const at::Tensor& a_log, const at::Tensor& d,
                                 const at::Tensor& bias) {
  const at::Tensor delta = at::softplus(raw + bias);
  const at::Tensor a = -at::exp(a_log);
  at::Tensor h = at::zeros({x.size(0), x.size(2), a.size(1)}, x.options());
  std::vector<at::Tensor> y;
  for (int64_t t = 0; t < x.size(1); ++t) {
    const at::Tensor step = delta.select(1, t).unsqueeze(2);  // (B, C, 1)
    h = at::exp(step * a) * h + step * b.select(1, t).unsqueeze(1) * x.select(1, t).unsqueeze(2);
    y.push_back((h * c.select(1, t).unsqueeze(1)).sum(2) + d * x.select(1, t));
  }
  return at::stack(y, 1) * at::silu(z);
}

// `w` has the order of MambaMixer's parameters. `mask` (B, S) is 0 for padding, and may be undefined.
inline at::Tensor mamba_mixer(const at::Tensor& x, const std::vector<at::Tensor>& w, const MambaMixerShape& shape,
                              const at::Tensor& mask = {}) {
  const auto masked = [&](const at::Tensor& states) { return mask.defined() ? states * mask.unsqueeze(2) : states; };
  const std::vector<at::Tensor> uz = reference::linear(masked(x), w[0]).split(shape.inner, 2);
  const at::Tensor u = masked(causal_conv1d(uz[0], w[1], w[2]));
  const std::vector<at::Tensor> dt_b_c =
      reference::linear(u, w[3]).split_with_sizes({shape.dt_rank, shape.state, shape.state}, 2);
  const at::Tensor raw = reference::linear(dt_b_c[0], w[4]);
  return reference::linear(selective_scan(u, raw, dt_b_c[1], dt_b_c[2], uz[1], w[5], w[6], w[7]), w[8]);
}

}  // namespace twobp::test::reference
