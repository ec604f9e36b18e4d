// The contract of a layer with a split backward pass:
//
//   forward      computes y from x and keeps in `saved` what the backward pass needs.
//   backward_p1  computes dL/dx from dL/dy, and small parameter gradients that come from the same pass over
//                memory (norm gains). It releases what only it needed and keeps what backward_p2 needs.
//   backward_p2  adds dL/dw of one or several micro-batches to the parameters' gradients.
//
// Inputs are taken by value. A layer owns the tensors that the caller moves in, and may overwrite those that are
// exclusively_owned. A layer instance belongs to one rank. Calls for different micro-batches may interleave, each with
// its own Saved.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "twobp/nn/context.h"
#include "twobp/nn/parameter.h"
#include "twobp/nn/saved.h"
#include "twobp/nn/values.h"

namespace twobp {

class Layer;

// The smallest unit of backward-p2: one leaf layer and one micro-batch.
struct P2Unit {
  Layer* layer = nullptr;
  Saved* saved = nullptr;
};

class Layer {
 public:
  virtual ~Layer() = default;

  virtual Values forward(Values x, Context& context, Saved& saved) = 0;
  virtual Values backward_p1(Values dy, Context& context, Saved& saved) = 0;
  // Receives several micro-batches only if they are to be concatenated.
  virtual void backward_p2(std::span<Saved* const> saved);

  // Appends this layer's units of backward-p2 for the micro-batch in `saved`: one per leaf layer, in the order in which
  // backward_p1 ran. A layer without backward-p2 appends nothing.
  virtual void collect_p2(Saved& saved, std::vector<P2Unit>& units);

  // Whether backward_p2 reads weights to which it does not add. Else a weight may change as soon as its own gradient is
  // complete, while other units of W are pending.
  virtual bool p2_reads_other_weights() const { return true; }

  // Appends the parameters in model order.
  virtual void collect_parameters(std::vector<Parameter*>& parameters);

  // Whether forward accepts an input with padded rows. Backward-p1 then returns a gradient that is padded in the same
  // way (padded_rows.h).
  virtual bool takes_padded_rows() const { return false; }
  // Called once before the first forward if the next layer accepts padded rows. The layer then pads the rows of its
  // output if that helps backward-p2.
  virtual void pad_rows() {}
};

// The layer's parameters, in model order.
std::vector<Parameter*> parameters_of(Layer& layer);

// Layers in sequence. Hands out W one leaf layer at a time.
class Sequential : public Layer {
 public:
  explicit Sequential(std::vector<std::unique_ptr<Layer>> layers);

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override;
  void collect_parameters(std::vector<Parameter*>& parameters) override;
  bool takes_padded_rows() const override { return layers_.front()->takes_padded_rows(); }
  void pad_rows() override { layers_.back()->pad_rows(); }

 private:
  std::vector<std::unique_ptr<Layer>> layers_;
};

// Sequential from layers given one by one.
template <typename... Layers>
std::unique_ptr<Sequential> make_sequential(std::unique_ptr<Layers>... layers) {
  std::vector<std::unique_ptr<Layer>> list;
  (list.push_back(std::move(layers)), ...);
  return std::make_unique<Sequential>(std::move(list));
}

}  // namespace twobp
