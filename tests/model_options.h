// The options of a configuration's model, and the same tiny sizes in another model type.
#pragma once

#include <string>

#include "twobp/models/decoder/family.h"
#include "twobp/models/models.h"
#include "twobp/train/config.h"

namespace twobp::test {

inline DecoderOptions& llama_of(Config& config) {
  return config.model.type.as<DecoderOptions>();
}
inline const DecoderOptions& llama_of(const Config& config) {
  return config.model.type.as<DecoderOptions>();
}

// Turns a LLaMa into a model of another type with its sizes.
inline BertOptions& make_bert(Config& config, int64_t positions, double dropout = 0) {
  const DecoderOptions from = llama_of(config);
  BertOptions bert;
  bert.dim = from.dim;
  bert.layers = from.layers;
  bert.heads = from.heads;
  bert.hidden = from.hidden;
  bert.vocab = from.vocab;
  bert.tied = from.tied;
  bert.init_std = from.init_std;
  bert.positions = positions;
  bert.dropout = bert.attention_dropout = dropout;
  config.model.type = bert;
  return config.model.type.as<BertOptions>();
}

inline MambaOptions& make_mamba(Config& config) {
  const DecoderOptions from = llama_of(config);
  MambaOptions mamba;
  mamba.dim = from.dim;
  mamba.layers = from.layers;
  mamba.vocab = from.vocab;
  mamba.tied = from.tied;
  mamba.init_std = from.init_std;
  config.model.type = mamba;
  return config.model.type.as<MambaOptions>();
}

inline MlpOptions& make_mlp(Config& config) {
  const DecoderOptions from = llama_of(config);
  MlpOptions mlp;
  mlp.dim = from.dim;
  mlp.layers = from.layers;
  mlp.hidden = from.hidden;
  mlp.init_std = from.init_std;
  config.model.type = mlp;
  return config.model.type.as<MlpOptions>();
}

}  // namespace twobp::test
