// y = x + scale * branch(x); dL/dx = dL/dy + the branch's dL/dx. This exists as one layer, or as two layers if a stage
// may end within the branch: x -> (x, begin(x)) and (x, b) -> x + end(b). Two branches beside each other are
// ResidualBegin and ResidualJoin: x -> (x, first(x)) and (x, f) -> x + f + second(x).
#pragma once

#include <memory>

#include "twobp/nn/layer.h"

namespace twobp {

// The base of these layers. Everything except the tensors is the branch's.
class AroundBranch : public Layer {
 public:
  explicit AroundBranch(std::unique_ptr<Layer> branch) : branch_(std::move(branch)) {}

  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override { branch_->collect_p2(saved, units); }
  void collect_parameters(std::vector<Parameter*>& parameters) override { branch_->collect_parameters(parameters); }

 protected:
  Layer& branch() { return *branch_; }

 private:
  std::unique_ptr<Layer> branch_;
};

class Residual : public AroundBranch {
 public:
  explicit Residual(std::unique_ptr<Layer> branch, double scale = 1) : AroundBranch(std::move(branch)), scale_(scale) {}

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;

 private:
  double scale_;
};

class ResidualBegin : public AroundBranch {
 public:
  using AroundBranch::AroundBranch;

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
};

class ResidualEnd : public AroundBranch {
 public:
  using AroundBranch::AroundBranch;

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
};

class ResidualJoin : public AroundBranch {
 public:
  using AroundBranch::AroundBranch;

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
};

}  // namespace twobp
