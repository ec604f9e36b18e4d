#include "twobp/models/mamba.h"

#include "twobp/core/check.h"
#include "twobp/nn/layers/cross_entropy.h"
#include "twobp/nn/layers/embedding.h"
#include "twobp/nn/layers/mamba_mixer.h"
#include "twobp/nn/layers/residual.h"
#include "twobp/nn/layers/rms_norm.h"
#include "twobp/nn/layers/sequential.h"

namespace twobp {

ModelSpec mamba(const MambaOptions& o) {
  TWOBP_CHECK(o.layers >= 1 && o.dim >= 1 && o.vocab >= 1 && o.state >= 1 && o.expand >= 1 && o.dt_rank >= 0,
              "a Mamba needs at least one layer, dim, vocab, state and expand of at least 1");
  const std::string embedding = "backbone.embeddings.weight";
  const MambaMixerShape shape{o.dim, o.expand * o.dim, o.state, o.conv_kernel,
                              o.dt_rank > 0 ? o.dt_rank : (o.dim + 15) / 16};
  ModelSpec model;
  model.layers.push_back({"backbone.embeddings", "embedding", [o, embedding] {
                            return std::make_unique<Embedding>(embedding, o.vocab, o.dim, o.init_std,
                                                               o.dtype);
                          }});
  for (int64_t i = 0; i < o.layers; ++i) {
    const std::string block = "backbone.layers." + std::to_string(i);
    model.layers.push_back(
        {block + ".in_proj", "in_proj", [o, shape, block] {
           return std::make_unique<ResidualBegin>(
               make_sequential(std::make_unique<RmsNorm>(block + ".norm.weight", o.dim, o.norm_eps, o.dtype),
                               make_linear({{block + ".mixer.in_proj.weight", 2 * shape.inner}}, o.dim,
                                           o.init_std, o.dtype, o.lora)));
         }});
    model.layers.push_back({block + ".mixer", "mixer", [o, shape, block] {
                              return std::make_unique<ResidualEnd>(std::make_unique<MambaMixer>(
                                  block + ".mixer", shape, o.init_std, o.dtype, o.lora));
                            }});
  }
  const std::string head = o.tied ? embedding : "lm_head.weight";
  model.layers.push_back(
      {"lm_head", "head", [o, head] {
         return make_sequential(
             std::make_unique<RmsNorm>("backbone.norm_f.weight", o.dim, o.norm_eps, o.dtype),
             make_linear({{head, o.vocab}}, o.dim, o.init_std, o.dtype, o.lora),
             std::make_unique<CrossEntropy>());
       }});
  return model;
}

}  // namespace twobp
