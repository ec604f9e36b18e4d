// AdamW, Adam and SGD on ATen's fused kernels, and Muon (muon.h), for the parameters of one rank.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "twobp/nn/parameter.h"
#include "twobp/train/config.h"
#include "twobp/train/update/muon.h"
#include "twobp/train/update/parameter_groups.h"
#include "twobp/train/update/savepoint.h"

namespace twobp {

class Optimizer {
 public:
  // A parameter, and the stage to which its state is booked.
  struct Item {
    Parameter* parameter = nullptr;
    int stage = 0;
    bool hidden = false;  // see ParameterGroups::rule_of
  };

  // Allocates the state on the calling thread.
  Optimizer(const OptimizerConfig& config, const std::vector<Item>& items);

  // Gives parameters without a gradient a gradient of 0. step() does this first.
  void complete_gradients();
  // One update with the gradients times `grad_factor`.
  void step(double lr, double grad_factor);
  // Drops the gradients.
  void skip();

  // Adds all tensors that step() changes. `gradients`: includes the gradients, which step() changes if it multiplies
  // them by a factor.
  void add_to(Savepoint& savepoint, bool gradients) const;
  // Undoes the last step() after the savepoint was rolled back to before it. The next step() replaces it, with the same
  // gradients. Nothing may have been added to them since.
  void undo();

  // One parameter's state, for checkpoints: `exp_avg` and `exp_avg_sq` of adam, `momentum` of sgd and
  // muon.
  struct State {
    Parameter* parameter = nullptr;
    std::string name;
    at::Tensor tensor;  // the tensor in use, of master's shape and dtype
  };
  std::vector<State> state() const;
  // Number of updates so far. With the state, it determines the next update.
  int64_t steps() const;
  void set_steps(int64_t steps);

 private:
  // Parameters that are updated alike.
  struct Group {
    ParameterRule rule;
    std::vector<Parameter*> parameters;
    std::vector<int> stages;  // of the parameters
    std::vector<at::Tensor> values, grads, first, second, steps;
  };

  bool adam(const Group& group) const { return config_.type != "sgd" && !group.rule.muon; }
  Group& group_of(const ParameterRule& rule);
  void update(const Group& group, double lr, double grad_factor);
  void update_by_muon(const Group& group, double lr, double grad_factor);

  OptimizerConfig config_;
  std::vector<Group> groups_;  // by rule
  at::Tensor count_;           // float32 scalar: the number of the current step
  bool stepped_ = false;
  bool undone_ = false;  // the last step was undone; its gradients still exist
};

}  // namespace twobp
