// y = x + branch(x); dL/dx = dL/dy + branch's dL/dx. Whole, or as two layers, so that a stage may end within
// the branch: x -> (x, begin(x)) and (x, b) -> x + end(b).
#pragma once

#include <memory>

#include "twobp/nn/layer.h"

namespace twobp {

class Residual : public Layer {
 public:
  explicit Residual(std::unique_ptr<Layer> branch) : branch_(std::move(branch)) {}

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override;
  void collect_parameters(std::vector<Parameter*>& parameters) override;
  void use_slabs(int slots, bool copy) override { branch_->use_slabs(slots, copy); }
  Slab* input_slab() override { return branch_->input_slab(); }
  Slab* gradient_slab() override { return branch_->gradient_slab(); }
  bool gradient_replaces_input() const override { return branch_->gradient_replaces_input(); }

 private:
  std::unique_ptr<Layer> branch_;
};

class ResidualBegin : public Layer {
 public:
  explicit ResidualBegin(std::unique_ptr<Layer> branch) : branch_(std::move(branch)) {}

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override;
  void collect_parameters(std::vector<Parameter*>& parameters) override;
  void use_slabs(int slots, bool copy) override { branch_->use_slabs(slots, copy); }
  Slab* input_slab() override { return branch_->input_slab(); }
  Slab* gradient_slab() override { return branch_->gradient_slab(); }  // of begin(x)

 private:
  std::unique_ptr<Layer> branch_;
};

class ResidualEnd : public Layer {
 public:
  explicit ResidualEnd(std::unique_ptr<Layer> branch) : branch_(std::move(branch)) {}

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override;
  void collect_parameters(std::vector<Parameter*>& parameters) override;
  void use_slabs(int slots, bool copy) override { branch_->use_slabs(slots, copy); }
  Slab* input_slab() override { return branch_->input_slab(); }  // for b
  Slab* gradient_slab() override { return branch_->gradient_slab(); }
  bool gradient_replaces_input() const override { return branch_->gradient_replaces_input(); }

 private:
  std::unique_ptr<Layer> branch_;
};

}  // namespace twobp
