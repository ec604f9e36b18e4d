// y = LayerNorm(x + dropout(branch(x))): half of a post-norm block (arXiv 1706.03762, section 3.1). Dropout, sum and
// norm take one pass over memory forward and one backward. The sum overwrites the branch's output, and the branch's
// gradient overwrites the sum.
#pragma once

#include <memory>

#include "twobp/nn/layers/dropout_rate.h"
#include "twobp/nn/layers/layer_norm.h"

namespace twobp {

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

}  // namespace twobp
