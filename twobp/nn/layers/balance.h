// The loss that balances the experts of all layers (arXiv 2101.03961, eq. 4 to 6, as transformers computes it): with L
// layers, T tokens that are no padding, and E experts,
//   loss = factor E sum over e of C_e P_e        C_e = tokens that choose e / (L T), P_e = sum of their s_e / (L T)
// It multiplies sums over all layers. So these travel with the activations from stage to stage, as a second value
// (2, E): counts, and sums of s (float64). The head computes the loss. Its derivative by the sums of s is the same for
// every layer and travels back with the gradient. Each micro-batch has its own sums; its loss counts as many times as
// it has targets, as the loss of its tokens does.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "twobp/nn/layers/residual.h"

namespace twobp {

// What a layer adds: tokens choose the experts `chosen` (tokens, k) by `scores` (tokens, E). Rows of `padding`
// (tokens), which may be undefined, do not count.
at::Tensor balance_sums(const at::Tensor& scores, const at::Tensor& chosen, const at::Tensor& padding);

// y -> (y, sums of no layer), after the embedding.
class BalanceBegin : public Layer {
 public:
  explicit BalanceBegin(int64_t experts) : experts_(experts) {}

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;

 private:
  int64_t experts_;
};

// (x, sums) -> (branch(x), sums + the second value of the branch, if it has one).
class BalanceBeside : public AroundBranch {
 public:
  using AroundBranch::AroundBranch;

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
};

// (x, sums) -> branch(x), a loss, and the loss of the sums. With slices, the last one computes that of the sequences.
class BalanceLoss : public Layer {
 public:
  // A token has `chosen` experts.
  BalanceLoss(std::unique_ptr<Layer> branch, double factor, int64_t chosen)
      : branch_(std::move(branch)), factor_(factor), chosen_(chosen) {}

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override;
  void collect_parameters(std::vector<Parameter*>& parameters) override { branch_->collect_parameters(parameters); }

 private:
  std::unique_ptr<Layer> branch_;
  double factor_;
  int64_t chosen_;
};

}  // namespace twobp
