// AdamW, Adam and SGD on ATen's fused kernels, for the parameters of one rank. Matrices are decayed, norm
// gains are not.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "twobp/nn/parameter.h"
#include "twobp/train/config.h"
#include "twobp/train/update/savepoint.h"

namespace twobp {

class Optimizer {
 public:
  // A parameter and the stage its state is booked on.
  struct Item {
    Parameter* parameter = nullptr;
    int stage = 0;
  };

  // Allocates the state on the calling thread.
  Optimizer(const OptimizerConfig& config, const std::vector<Item>& items);

  // Parameters without a gradient get gradient 0; step() does that first.
  void complete_gradients();
  // One update with the gradients times `grad_factor`.
  void step(double lr, double grad_factor);
  // Drops the gradients.
  void skip();

  // Adds all that step() changes; the gradients only if it is to have a factor, which they are multiplied by.
  void add_to(Savepoint& savepoint, bool gradients) const;
  // After the savepoint was rolled back to before the last step(): the next one is made in its place, with
  // the same gradients. Nothing may have been added to them since.
  void undo();

  // One parameter's state, for checkpoints: `exp_avg` and `exp_avg_sq` of adam, `momentum` of sgd.
  struct State {
    Parameter* parameter = nullptr;
    std::string name;
    at::Tensor tensor;  // the live one, of master's shape and dtype
  };
  std::vector<State> state() const;
  // Updates so far: with the state, all that the next one depends on.
  int64_t steps() const;
  void set_steps(int64_t steps);

 private:
  // Parameters that share hyper-parameters.
  struct Group {
    double weight_decay = 0;
    std::vector<Parameter*> parameters;
    std::vector<int> stages;  // of them
    std::vector<at::Tensor> values, grads, first, second, steps;
  };

  OptimizerConfig config_;
  std::vector<Group> groups_;  // decayed, not decayed
  at::Tensor count_;           // float32 scalar: the number of this step
  bool stepped_ = false;
  bool undone_ = false;  // the last step: its gradients are still there
};

}  // namespace twobp
