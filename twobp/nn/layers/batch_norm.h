// Batch normalization of images (batch, height, width, channels), arXiv 1502.03167. Channels are the last dimension;
// all other dimensions count as rows. Statistics are those of one micro-batch, and sums go in blocks of fixed size.
// Evaluation uses the running statistics and changes nothing.
#pragma once

#include "twobp/nn/kernels/image/image_kernels.h"
#include "twobp/nn/layer.h"

namespace twobp {

// The part that all layers with a batch norm share: its parameters, the running statistics, and passes over memory that
// are fused with the neighbours of a norm in a ResNet.
class BatchNormRows {
 public:
  // Parameter names follow Hugging Face and PyTorch: `name` with .weight, .bias, .running_mean, .running_var and
  // .num_batches_tracked. All are float32 if the layer computes in reduced precision.
  BatchNormRows(const std::string& name, int64_t channels, at::ScalarType dtype, double eps = 1e-5,
                double momentum = 0.1);

  // The numbers that normalize each channel, (4, channels): mean, 1 / deviation, gain / deviation, and the number that
  // is added last. Training computes them from x and updates the running statistics (the variance without bias).
  // Evaluation uses the running statistics. Throws Error for another shape or dtype, and in training for a single row,
  // which has no variance.
  at::Tensor scales(const at::Tensor& x, const Context& context);

  // y = norm(x), or max(0, norm(x)) if `relu`. y may be x.
  void apply(const at::Tensor& x, const at::Tensor& scales, const at::Tensor& y, bool relu) const;
  // y = max(0, norm(x) + other). If `other_scales` is defined, `other` is normalized with it. y may be x.
  void apply_add_relu(const at::Tensor& x, const at::Tensor& scales, const at::Tensor& other,
                      const at::Tensor& other_scales, const at::Tensor& y) const;

  // The whole of F: returns y. If nothing is kept, y may overwrite x. Otherwise x and its scales are kept until p1,
  // which takes them.
  at::Tensor forward(Values x, bool relu, Context& context, Saved& saved);
  struct Kept {
    at::Tensor x, scales;
  };
  static Kept take(Saved& saved) { return {saved.take_p1(0), saved.take_p1(1)}; }

  // Backward in two passes. The first adds the gradients of gain and bias. It returns what the second needs of each
  // channel, (2, channels): the mean gradient and its slope over x.
  at::Tensor backward_sums(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& scales, bool relu);
  // The first pass after apply_add_relu. It also writes the gradient before the ReLU to g, which may be dy.
  at::Tensor backward_sums_add_relu(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& scales,
                                    const at::Tensor& other, const at::Tensor& other_scales, const at::Tensor& g);
  // The second pass: dx, which may be dy or x. If y is defined, it receives the result of `apply`. y may be x if dx is
  // not x.
  void backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& scales, const at::Tensor& sums, bool relu,
                const at::Tensor& dx, const at::Tensor& y = {}) const;

  void collect_parameters(std::vector<Parameter*>& parameters);
  const std::string& name() const { return gain_.name(); }
  bool trainable() const { return gain_.trainable() || bias_.trainable(); }

 private:
  at::Tensor scales_by_operators(const at::Tensor& x, bool training);
  // The rest of backward_sums, given its sums (2, channels).
  at::Tensor finish_by_operators(const at::Tensor& sums, int64_t rows, const at::Tensor& scales);
  void batch_statistics(const at::Tensor& x, double* mean, double* variance);
  at::Tensor finish_sums(const at::Tensor& blocks, int64_t rows, const at::Tensor& scales);

  Parameter gain_, bias_;                         // (channels)
  Parameter running_mean_, running_var_, count_;  // (channels), (channels), ()
  at::ScalarType dtype_;
  double eps_;
  double momentum_;
};

// The norm, optionally followed by a ReLU. Backward-p1 computes the gradients of gain and bias in a pass that it makes
// anyway. The ReLU's mask is recomputed from the input.
class BatchNorm2d : public Layer {
 public:
  BatchNorm2d(const std::string& name, int64_t channels, bool relu, at::ScalarType dtype)
      : norm_(name, channels, dtype), relu_(relu) {}

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void collect_parameters(std::vector<Parameter*>& parameters) override { norm_.collect_parameters(parameters); }

 private:
  BatchNormRows norm_;
  bool relu_;
};

}  // namespace twobp
