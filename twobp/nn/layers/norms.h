// Norms of rows: LayerNorm, RMSNorm, a norm of a sum, and a norm of attention's queries and keys.
#pragma once

#include <functional>
#include <memory>

#include "twobp/nn/layer.h"
#include "twobp/nn/layers/dropout.h"

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

// y = x / sqrt(mean(x^2) + eps) * gain over the last dimension (arXiv 1910.07467, eq. 4). The gain is the weight, or 1
// + weight (Gemma). Backward-p1 computes the weight's gradient in the same pass over x and dy, so no work remains for
// backward-p2.

// The gain of an RMSNorm: its weight, or 1 + its weight.
enum class GainForm : uint8_t { kWeight, kOnePlusWeight };

class RmsGain : public Parameter {
 public:
  // float32 if the layer computes in reduced precision. The gain starts as 1.
  RmsGain(std::string name, int64_t dim, at::ScalarType dtype, GainForm form);

  at::Tensor gain() const { return form_ == GainForm::kWeight ? value : value + 1; }

 private:
  GainForm form_;
};

class RmsNorm : public Layer {
 public:
  RmsNorm(std::string name, int64_t dim, double eps, at::ScalarType dtype, GainForm form = GainForm::kWeight);

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void collect_parameters(std::vector<Parameter*>& parameters) override;

 private:
  RmsGain gain_;  // (dim)
  at::ScalarType dtype_;
  double eps_;
};

// y = LayerNorm(x + dropout(branch(x))): half of a post-norm block (arXiv 1706.03762, section 3.1). Dropout, sum and
// norm take one pass over memory forward and one backward. The sum overwrites the branch's output, and the branch's
// gradient overwrites the sum.
class AddNorm : public Layer {
 public:
  // `name` is that of LayerNormRows. The dropout is called `name`.dropout.
  AddNorm(std::unique_ptr<Layer> branch, const std::string& name, int64_t dim, double eps, double dropout,
          at::ScalarType dtype)
      : branch_(std::move(branch)), norm_(name, dim, eps, dtype), rate_(dropout, name + ".dropout") {}

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override;
  void collect_parameters(std::vector<Parameter*>& parameters) override;

 private:
  std::unique_ptr<Layer> branch_;
  LayerNormRows norm_;
  DropoutRate rate_;
};

// RMSNorm of queries and keys before attention: of each head (Qwen3, arXiv 2505.09388; Gemma 3), or of all queries and
// all keys of a position (OLMo 2, arXiv 2501.00656). Takes the packed projections (B, S, (H + 2 K) D) = (q | k | v) and
// normalises q and k in place. q and k as they were are kept until backward-p1, which computes the gains' gradients in
// the same pass.
struct QueryKeyNormShape {
  int64_t heads = 1;     // H
  int64_t kv_heads = 1;  // K
  int64_t head_dim = 1;  // D
  bool whole = false;    // one norm over all heads of a position, in place of one for each head
};

class QueryKeyNorm : public Layer {
 public:
  // The weights are (D), or (H D) and (K D) if whole.
  QueryKeyNorm(const std::string& query, const std::string& key, const QueryKeyNormShape& shape, double eps,
               at::ScalarType dtype, GainForm form = GainForm::kWeight);

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void collect_parameters(std::vector<Parameter*>& parameters) override;
  bool takes_padded_rows() const override { return true; }

 private:
  // Norms of `cols` numbers each that lie side by side in a row: those of q, or those of k.
  struct Part {
    int64_t first;  // number of the row where they begin
    int64_t count;
    int64_t cols;
    int64_t first_norm;  // number of the row's first norm of this part
    RmsGain* gain;
  };
  std::vector<Part> parts();
  int64_t width() const { return (shape_.heads + shape_.kv_heads) * shape_.head_dim; }  // of q and k

  QueryKeyNormShape shape_;
  at::ScalarType dtype_;
  double eps_;
  RmsGain query_;
  RmsGain key_;
};

}  // namespace twobp
