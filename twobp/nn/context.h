// What a layer is told about the micro-batch at hand, beside its input.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include <ATen/ATen.h>

namespace twobp {

class Slab;

// The batch's named tensors as the loader made them: `input_ids`, `labels`, masks, positions. On the host,
// where layers look at what they say, or on the rank's device, where nobody does.
using Fields = std::map<std::string, at::Tensor>;

struct Context {
  const Fields* fields = nullptr;
  uint64_t seed = 0;
  int64_t step = 0;
  int64_t micro_batch = 0;  // global index within the step
  bool training = true;     // false: evaluation
  bool backward = true;     // false: none follows, since all that it would reach is frozen
  // What the loss and its gradient are multiplied by: 1 / targets of the global batch.
  double loss_weight = 1;
  double loss_scale = 1;  // the gradient alone: keeps small ones in float16's range
  // Generation, a few positions a call: attention finds the positions before `past` in its cache, which has
  // room for `capacity`, and the loss hands on the logits.
  bool generating = false;
  int64_t past = 0;
  int64_t capacity = 0;
  // Where the result is wanted (see slab.h), null for anywhere: set by containers before each layer's call.
  Slab* destination = nullptr;
  // Nobody else reads the input, though it lies in a slot: set by containers before each layer's call, taken
  // away by layers that read it again after they have handed it on.
  bool owns_input = false;

  // Whether layers save what a backward needs.
  bool keeps() const { return training && backward; }

  // The field, or an Error that names it.
  const at::Tensor& field(const std::string& name) const;

  // A tensor for a layer's result (..., cols): in the micro-batch's slot of `destination` if there is one and
  // it fits, else fresh: in evaluation always, where slots belong to micro-batches that train. Clears
  // `destination`. With `padded`, a fresh one has padded rows (padded_rows.h).
  at::Tensor output(at::IntArrayRef sizes, const at::TensorOptions& options, bool padded = false);
};

}  // namespace twobp
