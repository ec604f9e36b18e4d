// A layer out of anything that PyTorch's autograd can differentiate, so that a model without split layers
// runs in the pipeline at once. Its I and W are two walks of the same graph, at autograd's price: more time
// than one walk, and memory that is freed by W only. Write a split layer (docs/add_a_layer.md) for what is
// worth it.
//
// Random numbers inside (dropout) come from LibTorch's generator: such a layer breaks the promise of equal
// bits.
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
  // y from the inputs (the layer before's outputs; none for a first layer, which reads the context's fields).
  // A loss returns a scalar, already times context.loss_weight.
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

// The module called with one tensor: any torch::nn::Module whose forward takes a tensor and gives one
// (torch::nn::Linear, Sequential, a Cloneable of one's own). The layer works on a copy of `prototype`, so
// that every layer that is made of it starts the same. Parameter names get `prefix` and a dot before them.
// Buffers stay as they are in training (BatchNorm's running statistics are not kept right: micro-batches run
// in any order).
template <typename ModuleHolder>
std::unique_ptr<Layer> from_module(const ModuleHolder& prototype, const std::string& prefix) {
  using Module = typename ModuleHolder::ContainedType;
  const ModuleHolder module(std::dynamic_pointer_cast<Module>(prototype->clone()));
  AutogradLayer::NamedLeaves leaves;
  for (const auto& item : module->named_parameters())
    leaves.emplace_back(prefix + "." + item.key(), item.value());
  return std::make_unique<AutogradLayer>(
      [module = module.ptr()](const Values& x, const Context& context) {
        module->train(context.training);
        return module->forward(x[0]);
      },
      std::move(leaves));
}

// The same from a TorchScript file (torch.jit.save). Throws Error: no such file, not TorchScript.
std::unique_ptr<Layer> from_torchscript(const std::string& path, const std::string& prefix);

}  // namespace twobp
