#include "twobp/data/next_token.h"

#include "twobp/core/check.h"
#include "twobp/data/data.h"
#include "twobp/nn/layers/attention_inputs.h"

namespace twobp {

Fields to_predicting_positions(Fields fields) {
  const auto found = fields.find("labels");
  if (found == fields.end()) return fields;
  at::Tensor& labels = found->second;
  TWOBP_CHECK(labels.dim() == 2 && labels.size(1) > 0, "labels have shape ", labels.sizes(),
              ", but must be (samples, positions): the token ids, or -100 where a token does not count");
  const int64_t others = labels.size(1) - 1;
  at::Tensor following = labels.narrow(1, 1, others);
  if (const auto starts = fields.find(kDocumentStarts); starts != fields.end()) {
    TWOBP_CHECK(starts->second.sizes() == labels.sizes(), kDocumentStarts, " has shape ", starts->second.sizes(),
                ", but labels have ", labels.sizes());
    const at::Tensor positions = at::arange(1, labels.size(1), starts->second.options());
    following = following.masked_fill(starts->second.narrow(1, 1, others).eq(positions), kIgnoredLabel);
  }
  labels = at::constant_pad_nd(following, {0, 1}, kIgnoredLabel);
  return fields;
}

}  // namespace twobp
