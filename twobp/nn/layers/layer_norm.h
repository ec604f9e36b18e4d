// y = (x - mean(x)) / sqrt(var(x) + eps) * gain + bias over the last dimension (arXiv 1607.06450). The
// gradients of gain and bias are computed inside backward-p1, in the same pass over x and dy.
#pragma once

#include <functional>

#include "twobp/nn/layer.h"

namespace twobp {

// What all layers with a LayerNorm in them share: its parameters and its passes over memory, in blocks of
// rows that stay in the cache, so that what belongs before and after can join.
class LayerNormRows {
 public:
  // Makes or uses up rows [begin, end) of the tensors at hand.
  using Rows = std::function<void(int64_t begin, int64_t end)>;

  // `name`: "bert.embeddings.LayerNorm", without ".weight".
  LayerNormRows(const std::string& name, int64_t dim, double eps, at::ScalarType dtype);

  const std::string& name() const { return name_; }
  int64_t dim() const { return gain_.sizes()[0]; }
  // Throws Error: a last dimension other than dim, another dtype.
  void check(const at::Tensor& x) const;

  // y (rows, dim) from x (rows, dim), both contiguous; y may be x only if x is not needed again. Gives mean
  // and 1 / deviation as (2, rows). For each block of rows first `before`, which may write them to x, and at
  // last `after`, which may change them in y.
  at::Tensor forward(const at::Tensor& x, at::Tensor& y, const Rows& before = {},
                     const Rows& after = {}) const;
  // dx, which may be dy or x, and the parameters' gradients. For each block of rows first `before`, which may
  // change them in dy, and at last `after`.
  void backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& statistics, at::Tensor& dx,
                const Rows& before = {}, const Rows& after = {});

  void collect_parameters(std::vector<Parameter*>& parameters);

 private:
  // dx by our kernels; gives dL/dgain and dL/dbias, (2, dim).
  at::Tensor backward_rows(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& statistics,
                           at::Tensor& dx, const Rows& before, const Rows& after) const;

  std::string name_;
  Parameter gain_;  // (dim), float32 where the layer computes in reduced precision
  Parameter bias_;
  at::ScalarType dtype_;
  double eps_;
};

class LayerNorm : public Layer {
 public:
  LayerNorm(const std::string& name, int64_t dim, double eps, at::ScalarType dtype)
      : norm_(name, dim, eps, dtype) {}

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void collect_parameters(std::vector<Parameter*>& parameters) override;

 private:
  LayerNormRows norm_;
};

}  // namespace twobp
