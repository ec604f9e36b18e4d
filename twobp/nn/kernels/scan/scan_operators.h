// The kernels of scan_kernels.h by LibTorch's operators (see operators.h). They work on whole sequences at once, except
// for the recurrence itself, which goes position by position. The permitted aliases are those of the kernels.
#pragma once

#include <ATen/ATen.h>

#include "twobp/nn/kernels/scan/scan_rows.h"

namespace twobp::operators {

// `borders` (batch, borders, state, channels) and `final` (batch, state, channels) are undefined if they are not
// wanted. An undefined `initial` means zeros.
void scan_forward(const ScanTensors& in, const at::Tensor& out, const at::Tensor& borders, const at::Tensor& initial,
                  const at::Tensor& final);

// dx may be dout. ddelta may be the input's delta, and dz its z.
void scan_backward(const ScanTensors& in, const at::Tensor& dout, const at::Tensor& borders,
                   const ScanGradientTensors& out);

// weight (kernel, channels), bias (channels).
void conv_forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& y);
// dw (batch, kernel, channels), dbias (batch, channels); dx may be x.
void conv_backward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& dy,
                   const at::Tensor& dx, const at::Tensor& dw, const at::Tensor& dbias);

}  // namespace twobp::operators
