// Causal depthwise convolution over the positions, followed by SiLU, as in Mamba (arXiv 2312.00752):
//   y_t = silu(bias + sum over k of w_k x_(t - K + 1 + k)), each channel on its own; x (B, S, C) -> y (B, S,
//   C)
// The weights are small, so backward-p1 computes their gradients. It also recomputes the sum, so only x is kept. A
// slice (Context::slice) reads the last inputs of the slices before it.
#pragma once

#include "twobp/nn/layer.h"

namespace twobp {

class CausalConv1d : public Layer {
 public:
  // `name`.weight (channels, 1, kernel) and `name`.bias (channels), as in Hugging Face.
  CausalConv1d(const std::string& name, int64_t channels, int64_t kernel, at::ScalarType dtype);

  // x may be a part of a wider matrix, so its rows may lie apart. In generation, Saved::cache holds the last kernel - 1
  // inputs.
  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  // As backward_p1, for a container that owns x's memory: dx, of x's shape, may overwrite x.
  void backward_p1_into(const at::Tensor& dx, at::Tensor dy, Context& context, Saved& saved);
  void collect_parameters(std::vector<Parameter*>& parameters) override;

 private:
  at::Tensor convolve(const at::Tensor& x, at::Tensor y) const;
  // For a slice, returns the kernel - 1 inputs before its first one, (B, kernel - 1, C). They are 0 at the beginning of
  // a sequence.
  at::Tensor inputs_before(const Saved& saved, const at::Tensor& x) const;
  // For a slice, corrects the outputs y that read inputs of earlier slices, and leaves inputs for later ones.
  void go_on(const at::Tensor& x, at::Tensor& y, Saved& saved) const;
  void backward_slice(const at::Tensor& x, const at::Tensor& dy, const at::Tensor& dx, Saved& saved);
  // dx may be x.
  void backward_into(const at::Tensor& dx, const at::Tensor& x, at::Tensor dy, Context& context, Saved& saved);
  void backward(const at::Tensor& x, const at::Tensor& dy, const at::Tensor& dx);
  // Runs the kernels, one group of channels at a time.
  void backward_groups(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& dy, const at::Tensor& dx,
                       const at::Tensor& dweight, const at::Tensor& dbias) const;

  Parameter weight_;  // float32 if the layer computes in reduced precision; also the bias
  Parameter bias_;
  at::ScalarType dtype_;
  int64_t channels_;
  int64_t kernel_;
};

}  // namespace twobp
