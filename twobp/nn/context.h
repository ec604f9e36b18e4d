// What a layer is told about the micro-batch at hand, beside its input.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include <ATen/ATen.h>

namespace twobp {

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

  // Whether layers save what a backward needs.
  bool keeps() const { return training && backward; }

  // The field, or an Error that names it.
  const at::Tensor& field(const std::string& name) const;
};

}  // namespace twobp
