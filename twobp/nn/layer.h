// The contract of a layer with a split backward:
//
//   forward      y from x; keeps in `saved` what the backward needs;
//   backward_p1  dL/dx from dL/dy, and the small parameter gradients that fall out of the same pass over
//                memory (norm gains); releases what only it needed, keeps what backward_p2 needs;
//   backward_p2  dL/dw of one or several micro-batches, added to the parameters' gradients.
//
// Inputs are taken by value: what the caller moves in, the layer owns, and may overwrite if
// exclusively_owned. A layer instance belongs to one rank; calls for different micro-batches may interleave,
// each with its Saved.
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

// The smallest piece of backward-p2: one leaf layer, one micro-batch.
struct P2Unit {
  Layer* layer = nullptr;
  Saved* saved = nullptr;
};

class Layer {
 public:
  virtual ~Layer() = default;

  virtual Values forward(Values x, Context& context, Saved& saved) = 0;
  virtual Values backward_p1(Values dy, Context& context, Saved& saved) = 0;
  // Several micro-batches are given only when they are to be concatenated.
  virtual void backward_p2(std::span<Saved* const> saved);

  // Appends this layer's backward-p2 of the micro-batch in `saved`, leaf by leaf, in the order backward_p1
  // ran. A layer without backward-p2 appends nothing.
  virtual void collect_p2(Saved& saved, std::vector<P2Unit>& units);

  // Parameters in model order.
  virtual void collect_parameters(std::vector<Parameter*>& parameters);

  // Whether forward reads an input whose rows are padded, and backward-p1 gives a gradient padded likewise
  // (padded_rows.h).
  virtual bool takes_padded_rows() const { return false; }
  // Told once, before the first forward, if the next layer takes padded rows: pad the output's, if that helps
  // backward-p2.
  virtual void pad_rows() {}
};

}  // namespace twobp
