// y = (x - mean(x)) / sqrt(var(x) + eps) * gain + bias over the last dimension (arXiv 1607.06450). Backward-p1 computes
// the gradients of gain and bias in the same pass over x and dy.
#pragma once

#include <functional>

#include "twobp/nn/layer.h"

namespace twobp {

// The part that all layers with a LayerNorm share: its parameters and its passes over memory. The passes go in blocks
// of rows that stay in the cache, so that neighbouring operations can join them.
class LayerNormRows {
 public:
  // Computes or consumes rows [begin, end) of the tensors of a pass.
  using Rows = std::function<void(int64_t begin, int64_t end)>;

  // `name` is that of the module, without ".weight": "bert.embeddings.LayerNorm".
  LayerNormRows(const std::string& name, int64_t dim, double eps, at::ScalarType dtype);

  const std::string& name() const { return name_; }
  int64_t dim() const { return gain_.sizes()[0]; }
  // Throws Error if the last dimension is not dim, or for another dtype.
  void check(const at::Tensor& x) const;

  // y (rows, dim) from x (rows, dim), both contiguous. y may be x only if x is not needed again. Returns mean and 1 /
  // deviation as (2, rows). For each block of rows, `before` runs first and may write the rows to x. `after` runs last
  // and may change the rows in y.
  at::Tensor forward(const at::Tensor& x, at::Tensor& y, const Rows& before = {}, const Rows& after = {}) const;
  // Computes dx, which may be dy or x, and the parameters' gradients. For each block of rows, `before` runs first and
  // may change the rows in dy. `after` runs last.
  void backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& statistics, at::Tensor& dx,
                const Rows& before = {}, const Rows& after = {});

  void collect_parameters(std::vector<Parameter*>& parameters);

 private:
  // Computes dx by our kernels. Returns dL/dgain and dL/dbias, (2, dim).
  at::Tensor backward_rows(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& statistics, at::Tensor& dx,
                           const Rows& before, const Rows& after) const;

  std::string name_;
  Parameter gain_;  // (dim), float32 if the layer computes in reduced precision
  Parameter bias_;
  at::ScalarType dtype_;
  double eps_;
};

class LayerNorm : public Layer {
 public:
  LayerNorm(const std::string& name, int64_t dim, double eps, at::ScalarType dtype) : norm_(name, dim, eps, dtype) {}

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void collect_parameters(std::vector<Parameter*>& parameters) override;

 private:
  LayerNormRows norm_;
};

}  // namespace twobp
