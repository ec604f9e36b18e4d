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
#pragma once

#include "twobp/nn/kernels/scan/scan_rows.h"
#include "twobp/nn/layer.h"

namespace twobp {

class SelectiveScan : public Layer {
 public:
  // Parameters `mixer`.A_log (channels, state), .D (channels) and .dt_proj.bias (channels).
  SelectiveScan(const std::string& mixer, int64_t channels, int64_t state, at::ScalarType dtype);

  // x, raw, (B | C), z -> y. x, raw, y and z are (batch, sequence, channels); (B | C) is (batch, sequence, 2 state).
  // Rows of the inputs may lie apart. In generation, Saved::cache holds the states after the last position.
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

}  // namespace twobp
