#include "twobp/models/decoder/names.h"

namespace twobp {

TensorNames decoder_names(const DecoderFamily& family, const DecoderOptions& o) {
  TensorNames names;
  names.rename = family.rename;
  if (o.tied) names.copies[family.names.head + ".weight"] = family.names.embedding + ".weight";
  if (!family.rotary) return names;
  // Early files have the frequencies of every layer. Those of a stretched embedding are the ones before the stretching:
  // at that time the positions were divided instead.
  const int64_t dims = rotary_dims(family, o);
  const RopeSettings rope = attention_shape(family, o, 0).rope;
  names.derived = [rope, dims](const std::string& name) -> std::vector<at::Tensor> {
    if (!name.ends_with(".rotary_emb.inv_freq")) return {};
    RopeSettings unstretched;
    unstretched.theta = rope.theta;
    return {rope_frequencies(rope, dims), rope_frequencies(unstretched, dims)};
  };
  return names;
}

}  // namespace twobp
