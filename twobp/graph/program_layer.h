// A layer of a captured module. It runs the layer's programs: forward or evaluate, backward-p1, and each unit of
// backward-p2 as a P2Unit of its own.
#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "twobp/graph/graph.h"
#include "twobp/graph/interpreter.h"
#include "twobp/nn/layer.h"

namespace twobp::graph {

class ProgramLayer : public Layer {
 public:
  ProgramLayer(std::shared_ptr<const Graph> graph, int layer);
  ~ProgramLayer() override;

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override;
  // Parameters, then buffers.
  void collect_parameters(std::vector<Parameter*>& parameters) override;

 private:
  class Unit;
  // The plan and constants of the layer for one shape of a micro-batch.
  struct ForShape;

  const Plan& plan_of(const Shape& shape) const;
  // Throws Error if there is no program for the micro-batch, or for a slice of it.
  // The result stays until the next call.
  const ForShape& shape_of(const Context& context);
  // That of the parameters and buffers. A layer without any computes where the values are that it gets.
  at::Device device() const;
  void find_device(const Values& x);
  uint64_t random_of(const Context& context) const;
  // For code that runs in a context. `saved` is that of the layer.
  CallContext call_context(const Context& context, uint64_t random, const Plan& plan, Saved& saved) const;
  at::Tensor scalar(const LossFactor& factor) const;
  at::Tensor input(const Input& input, const ForShape& shape, Values& x, const Context& context) const;

  std::shared_ptr<const Graph> graph_;
  int layer_;
  std::vector<std::unique_ptr<Parameter>> parameters_;
  std::vector<std::unique_ptr<Parameter>> buffers_;
  std::vector<Parameter*> trained_or_not_;  // parameters_, as the interpreter takes them
  at::Device device_of_values_ = at::kCPU;  // see device()
  // Those of recent micro-batches. Each holds its Shape.
  std::map<const Shape*, std::unique_ptr<const ForShape>> shapes_;
  // By index in a plan and the parameters that they add to. They serve all shapes, and none goes.
  std::map<std::pair<size_t, std::vector<int>>, std::unique_ptr<Unit>> units_;
  uint64_t dropped_ = 0;  // Graph::dropped() when shapes_ was cleared
};

}  // namespace twobp::graph
