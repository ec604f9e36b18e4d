// Mamba's layers (arXiv 2312.00752): the causal convolution, the selective scan, and the mixer that has both.
#pragma once

#include "twobp/nn/kernels/scan/scan_operators.h"
#include "twobp/nn/layer.h"
#include "twobp/nn/layers/lora_linear.h"

namespace twobp {

// Causal depthwise convolution over the positions, followed by SiLU, as in Mamba (arXiv 2312.00752):
//   y_t = silu(bias + sum over k of w_k x_(t - K + 1 + k)), each channel on its own; x (B, S, C) -> y (B, S,
//   C)
// The weights are small, so backward-p1 computes their gradients. It also recomputes the sum, so only x is kept. A
// slice (Context::slice) reads the last inputs of the slices before it.
class CausalConv1d : public Layer {
 public:
  // `name`.weight (channels, 1, kernel) and `name`.bias (channels), as in Hugging Face.
  CausalConv1d(const std::string& name, int64_t channels, int64_t kernel, at::ScalarType dtype);

  // x may be a part of a wider matrix, so its rows may lie apart.
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

// The selective scan of Mamba (arXiv 2312.00752, algorithm 2) with the operations around it: softplus of delta, the
// skip by D, the gate. Per position t and channel, with a state of N numbers and A = -exp(A_log):
//   delta = softplus(raw + bias)           h_t = exp(delta A) h_(t-1) + delta B_t x_t
//   y_t = (C_t . h_t + D x_t) silu(z_t)
// The (batch, sequence, channel, state) tensor never exists. Forward keeps its inputs and the states at the borders of
// chunks. Backward-p1 recomputes the states of a chunk and then goes through the chunk from its end. This gives the
// gradients of all inputs and of A_log, D and the bias, so no work remains for backward-p2.
//
// A slice (Context::slice) begins with the final states of the previous slice. Its I passes the gradient of these
// states to the previous slice's I.
class SelectiveScan : public Layer {
 public:
  // Parameters `mixer`.A_log (channels, state), .D (channels) and .dt_proj.bias (channels).
  SelectiveScan(const std::string& mixer, int64_t channels, int64_t state, at::ScalarType dtype);

  // x, raw, (B | C), z -> y. x, raw, y and z are (batch, sequence, channels); (B | C) is (batch, sequence, 2 state).
  // Rows of the inputs may lie apart.
  Values forward(Values values, Context& context, Saved& saved) override;
  // dL/dy -> the gradients of x, raw, (B | C) and z.
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  // The same for a container that provides the last two tensors: `dbc` and `dz`. `dz` may be the z of forward.
  Values backward_p1_into(at::Tensor dy, at::Tensor dbc, at::Tensor dz, Saved& saved);
  void collect_parameters(std::vector<Parameter*>& parameters) override;

 private:
  void check(const ScanTensors& inputs) const;
  // For a slice, returns the states (batch, state, channels) after the previous slice. Undefined for the first slice.
  at::Tensor states_before(const Saved& saved) const;
  // Runs the kernels, one group of channels at a time. `cache` receives the states after the last position. If
  // `going_on`, it also holds the states before the first position.
  void forward_groups(const ScanTensors& in, const at::Tensor& y, const at::Tensor& borders, const at::Tensor& cache,
                      bool going_on) const;
  void backward_groups(const ScanTensors& in, const at::Tensor& dy, const at::Tensor& borders,
                       const ScanGradientTensors& to) const;
  // `rates` computes A (channels, state), in A_log's dtype. `scaled` returns A log2(e), (state, channels), for the
  // kernels.
  at::Tensor rates() const;
  at::Tensor scaled(const at::Tensor& rates) const;
  void add_parameter_gradients(const at::Tensor& rates, const at::Tensor& da, const at::Tensor& dd,
                               const at::Tensor& dbias);

  Parameter a_log_;  // float32 if the layer computes in reduced precision; also the others
  Parameter d_;
  Parameter bias_;
  at::ScalarType dtype_;
  int64_t channels_;
  int64_t state_;
};

struct MambaMixerShape {
  int64_t dim = 256;
  int64_t inner = 512;      // channels of the convolution and the scan
  int64_t state = 16;       // numbers per channel
  int64_t conv_kernel = 4;  // positions
  int64_t dt_rank = 16;     // width of dt before dt_proj
};

class MambaMixer : public Layer {
 public:
  // Parameters have Hugging Face's names: `name`.conv1d.weight, .A_log and so on. The bias of dt_proj belongs to the
  // scan.
  MambaMixer(const std::string& name, const MambaMixerShape& shape, double init_std, at::ScalarType dtype,
             const LoraOptions& lora = {});

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override;
  void collect_parameters(std::vector<Parameter*>& parameters) override;

 private:
  MambaMixerShape shape_;
  CausalConv1d conv_;
  std::unique_ptr<Layer> x_proj_;
  std::unique_ptr<Layer> dt_proj_;
  SelectiveScan scan_;
  std::unique_ptr<Layer> out_proj_;
};

}  // namespace twobp
