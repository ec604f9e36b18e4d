// A layer made of any function that PyTorch's autograd can differentiate, so that a model without split layers runs in
// the pipeline at once. I and W each walk the same autograd graph. This takes more time than one walk, and only W frees
// the graph's memory. Write a split layer (docs/add_a_layer.md) where this cost matters.
//
// Random numbers inside (dropout) come from LibTorch's generator, so the bits of such a layer depend on the schedule.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "twobp/nn/layer.h"

namespace twobp {

class AutogradLayer : public Layer {
 public:
  // Returns y for the inputs: the outputs of the previous layer, or none for a first layer, which reads the context's
  // fields. A loss returns a scalar that is already multiplied by context.loss_weight.
  using Function = std::function<at::Tensor(const Values& inputs, const Context& context)>;
  // Leaf tensors that the function uses, by name. Layers of one model need different names.
  using NamedLeaves = std::vector<std::pair<std::string, at::Tensor>>;

  AutogradLayer(Function function, NamedLeaves leaves);

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void backward_p2(std::span<Saved* const> saved) override;
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override;
  void collect_parameters(std::vector<Parameter*>& parameters) override;

 private:
  // Makes the leaves use the parameters' memory, which the optimizer updates.
  void link();

  Function function_;
  NamedLeaves leaves_;
  std::vector<std::unique_ptr<Parameter>> parameters_;  // as leaves_
};

// Makes a layer of a torch::nn::Module whose forward takes one tensor and returns one (torch::nn::Linear, Sequential, a
// Cloneable of your own). The layer works on a copy of `prototype`, so all layers that are made of it start with the
// same values. Parameter names get `prefix` and a dot before them. Buffers are not managed: BatchNorm's running
// statistics are wrong, because micro-batches run in any order.
template <typename ModuleHolder>
std::unique_ptr<Layer> from_module(const ModuleHolder& prototype, const std::string& prefix) {
  using Module = typename ModuleHolder::ContainedType;
  const ModuleHolder module(std::dynamic_pointer_cast<Module>(prototype->clone()));
  AutogradLayer::NamedLeaves leaves;
  for (const auto& item : module->named_parameters()) leaves.emplace_back(prefix + "." + item.key(), item.value());
  return std::make_unique<AutogradLayer>(
      [module = module.ptr()](const Values& x, const Context& context) {
        module->train(context.training);
        return module->forward(x[0]);
      },
      std::move(leaves));
}

}  // namespace twobp
