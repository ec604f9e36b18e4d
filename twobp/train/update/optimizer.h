// AdamW, Adam and SGD on ATen's fused kernels, and Muon (muon.h), for the parameters of one rank.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "twobp/models/model.h"
#include "twobp/nn/parameter.h"
#include "twobp/train/config.h"

namespace twobp {

// Copies of tensors for rolling back.
class Savepoint {
 public:
  // Allocates the copy, booked to the stage as optimizer state. `live` changes in place later.
  void add(const at::Tensor& live, int stage);
  void save();
  void roll_back() const;

 private:
  struct Entry {
    at::Tensor live, copy;
  };
  std::vector<Entry> entries_;
};

// Muon, for matrices of hidden layers: a step along the momentum, made orthogonal (K. Jordan et al., "Muon: An
// optimizer for hidden layers in neural networks", 2024). The size of a step is matched to AdamW's, so that both share
// a learning rate (J. Liu et al., arXiv 2502.16982, section 2.2). With gradient G, momentum B, weight W of (m, n) and
// mu = momentum:
//   B <- mu B + (1 - mu) G
//   U  = (1 - mu) G + mu B                                       (Nesterov)
//   W <- (1 - lr decay) W - lr 0.2 sqrt(max(m, n)) orthogonalized(U)
// as in torch.optim.Muon with adjust_lr_fn="match_rms_adamw".
struct MuonMatrix {
  at::Tensor value, grad, momentum;  // (m, n), or (groups, m / groups, n), of one dtype
  at::ScalarType type;               // of the iteration
};

struct MuonStep {
  double lr = 0;
  double weight_decay = 0;
  double momentum = 0;
};

// One step for all matrices.
void muon_step(const std::vector<MuonMatrix>& matrices, const MuonStep& step);

// For each of a batch of matrices (batch, m, n), m <= n, with singular value decomposition U S V: a matrix close to U
// V, whose singular values are about 0.7 to 1.2. Five steps of the Newton-Schulz iteration with Jordan's coefficients,
// in `type`. Overwrites its argument.
at::Tensor orthogonalized(at::Tensor matrices, at::ScalarType type);

// A number in proportion to the time of a step for the parameter's projections.
int64_t muon_work(const Parameter& parameter);

// How the optimizer treats each parameter: with optimizer.weight_decay if it is a matrix or kernel, and with none if it
// is a bias or norm gain, unless optimizer.groups says otherwise for its name.

// The name of the matrix that multiplies last. Empty if none does.
std::string last_matrix(const ModelSpec& model);
// Whether Muon takes the parameter: a matrix that multiplies, is no table, and is not `last`.
bool in_hidden_layer(const Parameter& parameter, const std::string& last);

struct ParameterRule {
  bool muon = false;  // in place of AdamW
  double weight_decay = 0;
  double lr_scale = 1;  // of the learning rate

  bool operator==(const ParameterRule&) const = default;
};

// The entries of optimizer.groups, in order.
class ParameterGroups {
 public:
  // Throws Error for entries that are not PATTERN KEY=VALUE...
  explicit ParameterGroups(const OptimizerConfig& config);

  // Throws Error if a pattern matches none of the names.
  void check(const std::vector<std::string>& names) const;
  // `hidden`: see in_hidden_layer. Throws Error if the
  // parts of a packed weight get different rules, and if a group gives Muon a parameter that is no matrix.
  ParameterRule rule_of(const Parameter& parameter, bool hidden) const;

 private:
  // An entry of optimizer.groups. Settings that it does not mention stay as they are.
  struct Group {
    std::string pattern;
    std::optional<double> weight_decay, lr_scale;
    std::optional<bool> muon;
  };
  static Group parse(const std::string& text, bool of_muon);

  bool muon_;
  double weight_decay_;
  std::vector<Group> groups_;
};

class Optimizer {
 public:
  // A parameter, or a part of it, and the stage to which its state is booked.
  struct Item {
    Parameter* parameter = nullptr;
    int stage = 0;
    bool hidden = false;  // see ParameterGroups::rule_of
    // Only these numbers, in the order of memory: [begin, end). Negative: all.
    int64_t begin = 0;
    int64_t end = -1;

    bool whole() const { return end < 0; }
    // These numbers of a tensor that is laid out as the parameter. Flat unless they are all.
    at::Tensor of(const at::Tensor& tensor) const;
  };

  // Allocates the state on the calling thread.
  Optimizer(const OptimizerConfig& config, const std::vector<Item>& items);

  // Gives parameters without a gradient a gradient of 0. step() does this first.
  void complete_gradients();
  // One update with the gradients times `grad_factor`.
  void step(double lr, double grad_factor);
  // The part of the next step() that is for these parameters, which have gradients. step() then leaves them out.
  void step_early(const std::vector<Parameter*>& parameters, double lr);
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
    Item item;
    std::string name;
    at::Tensor tensor;  // the tensor in use, of master's dtype and of the shape of item.of(master)
  };
  std::vector<State> state() const;
  // Number of updates so far. With the state, it determines the next update.
  int64_t steps() const;
  void set_steps(int64_t steps);

 private:
  // Parameters that are updated alike.
  struct Group {
    ParameterRule rule;
    std::vector<Item> items;
    std::vector<at::Tensor> values, first, second;
    std::vector<bool> done;  // by step_early()
  };
  // The tensors of some of a group's parameters.
  struct Tensors {
    std::vector<at::Tensor> values, grads, first, second, steps;
  };

  bool adam(const Group& group) const { return config_.type != "sgd" && !group.rule.muon; }
  Group& group_of(const ParameterRule& rule);
  // Updates those at these indices, and forgets their gradients.
  void update(const Group& group, const std::vector<size_t>& which, double lr, double grad_factor);
  void update_by_muon(const Group& group, const std::vector<size_t>& which, double lr, double grad_factor) const;
  void update_fused(const Group& group, const std::vector<size_t>& which, double lr, double grad_factor);

  OptimizerConfig config_;
  std::vector<Group> groups_;  // by rule
  at::Tensor count_;           // float32 scalar: the number of the current step
  bool begun_ = false;         // step_early() has counted the step
  bool stepped_ = false;
  bool undone_ = false;  // the last step was undone; its gradients still exist
};

}  // namespace twobp
