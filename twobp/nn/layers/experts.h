// A mixture of experts in place of an MLP (arXiv 2101.03961, 2401.04088): a router chooses a few experts for each
// token, each expert is a gated MLP, and the token's output is their weighted sum.
//   s = softmax(x R^T)          the token's experts are its k largest s; their weights w are s, or s over their sum
// DeepSeek's routers (arXiv 2405.04434, section 2.2.2; 2412.19437, section 2.1.2) differ as ExpertsShape says.
//   y = sum over them of w_e down_e(gate(gate_e x) * up_e x)
// No token is dropped. The rows of all tokens are sorted by expert, so that an expert's rows lie together.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "twobp/nn/kernels/rows/row_operations.h"
#include "twobp/nn/layer.h"
#include "twobp/nn/layers/linear.h"
#include "twobp/nn/layers/lora_linear.h"

namespace twobp {

// The rows of group g times a matrix of their own, W_g (out, in): y = x W_g^T. One side has a row for each row of the
// groups, and the other a row for each token, from which each row of the groups takes the one at its place. If the
// groups are a share of a layer's experts, there are rows of several sources, one after the other. The rows of each
// source and group are then a product of their own, whose bits depend on its number of rows.
// Of rows that are not tokens', y may have a bias of the group.
//   p1: dx = dy W_g, db_g += sum of dy's rows        p2: dW_g += dy^T x, a unit for all groups
// Each group may have an adapter (lora_linear.h) of its own, A_g and B_g. Then W_g and the bias are frozen.
class GroupedLinear : public Layer {
 public:
  enum class Tokens : uint8_t { kInput, kGradient };  // the side that has a row for each token

  struct Adapter {
    Parameter a;  // (groups * rank, in), named "NAME.0.lora_A.weight" and so on, by the layer's expert
    Parameter b;  // (groups * out, rank)
    double scale;
  };

  // The parts have the groups' rows, one group after the other.
  GroupedLinear(std::vector<ParameterPart> parts, int64_t groups, int64_t in, double init_std, at::ScalarType dtype,
                Tokens tokens, ExpertShare share = {}, bool bias = false);
  // Before any other call. Makes the adapters' parameters.
  void adapt(const std::string& name, const LoraOptions& lora, at::ScalarType dtype);

  // x; ends (sources * groups), see for_groups; places (rows of all groups).
  Values forward(Values values, Context& context, Saved& saved) override;
  // Returns a row for each row of the groups.
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void backward_p2(std::span<Saved* const> saved) override;
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override;
  bool p2_reads_other_weights() const override { return false; }
  void collect_parameters(std::vector<Parameter*>& parameters) override;

 private:
  at::Tensor by_group(const Parameter& parameter) const {
    return parameter.value.view({groups_, -1, parameter.value.size(1)});
  }
  // Adds dy^T x of each source and group to the gradient, where dy has a row for each row of the groups, or as `tokens`
  // says.
  void write_gradient(Parameter& parameter, const at::Tensor& ends, const at::Tensor& places, const at::Tensor& dy,
                      bool dy_of_tokens, const at::Tensor& x, bool x_of_tokens) const;
  bool trains() const {
    return weight_.trainable() || (adapter_ && (adapter_->a.trainable() || adapter_->b.trainable()));
  }

  Parameter weight_;               // (groups * out, in)
  std::optional<Parameter> bias_;  // (groups * out)
  std::optional<Adapter> adapter_;
  int64_t groups_;
  ExpertShare share_;
  Tokens tokens_;
};

struct ExpertsShape {
  int64_t dim = 0;
  int64_t hidden = 0;  // of an expert
  int64_t experts = 0;
  int64_t chosen = 0;       // for each token
  bool normalized = false;  // whether a token's weights sum to 1
  Gate gate{};
  bool biased = false;    // router and experts have biases
  double gate_limit = 0;  // above 0: gpt-oss's form of silu, (up + 1) gate sigmoid(1.702 gate), where gate is at most
                          // the limit and up within it on both sides
  bool balanced = false;  // whether F also gives the sums of balance.h, and I takes their gradient
  ExpertShare share{};    // of the experts that are here
  bool sigmoid = false;   // s = sigmoid(x R^T)
  int64_t groups = 1;  // of experts: a token chooses among those of its `chosen_groups` best, by their best s, or with
                       // sigmoid by the sum of their two best
  int64_t chosen_groups = 1;
  double scale = 1;         // of the weights
  double balance_rate = 0;  // by which a step changes the correction of each expert (ExpertsNames::correction); 0: none
};

// The parameters are named router.weight and expert0.gate.weight, with the given names.
struct ExpertsNames {
  std::string router;
  std::string experts;  // "model.layers.0.mlp.experts."
  std::string gate, up, down;
  // A number for each expert, which is added to s to choose experts, but not to weigh them. It has no gradient. "":
  // none
  std::string correction{};
  // Of gate and up, and of down, for their adapters: "model.layers.0.mlp.experts.gate_up_proj".
  std::string input_module{}, output_module{};
};

// y = sigmoid(gate(x)) body(x), where the gate gives one number for each token.
class Switched : public Layer {
 public:
  Switched(std::unique_ptr<Layer> gate, std::unique_ptr<Layer> body) : gate_(std::move(gate)), body_(std::move(body)) {}

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override;
  void collect_parameters(std::vector<Parameter*>& parameters) override;

 private:
  std::unique_ptr<Layer> gate_, body_;
};

class Experts : public Layer {
 public:
  // What `shared` gives for a token is added to the sum; it may be null.
  Experts(const ExpertsNames& names, const ExpertsShape& shape, double init_std, at::ScalarType dtype,
          std::unique_ptr<Layer> shared = nullptr, const LoraOptions& lora = {});

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override;
  void collect_parameters(std::vector<Parameter*>& parameters) override;

 private:
  // The experts of each token, (tokens, chosen).
  at::Tensor choose(const at::Tensor& scores) const;
  // Of a token's weights as functions of the scores: dL/dlogits from dL/dweights.
  at::Tensor gradient_of_logits(at::Tensor dweights, const at::Tensor& weights, const at::Tensor& scores,
                                const at::Tensor& chosen) const;
  // (tokens, experts): each token's weights, 0 for experts that it does not choose.
  at::Tensor of_experts(const at::Tensor& weights, const at::Tensor& chosen) const;
  at::Tensor output_biases() const { return output_bias_->value.view({shape_.experts, shape_.dim}); }
  ExpertGroup& group(const Context& context) const;

  // Throws Error for a score that is not finite. F of a step that may be taken back can have some, so training asks in
  // I.
  // `computed`: the type of the layer's input.
  void check_scores(const at::Tensor& scores, at::ScalarType computed) const;

  ExpertsShape shape_;
  std::string router_name_;
  Linear router_;
  GroupedLinear input_;                   // gate and up
  GroupedLinear output_;                  // down
  std::optional<Parameter> output_bias_;  // (experts * dim)
  std::optional<Parameter> correction_;   // (experts)
  std::optional<Parameter> tokens_;       // of a step, for the correction
  std::unique_ptr<Layer> shared_;
};

}  // namespace twobp
