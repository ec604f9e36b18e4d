#include "twobp/core/check.h"
#include "twobp/models/decoder/family.h"
#include "twobp/models/models.h"
#include "twobp/nn/layer.h"
#include "twobp/nn/layers/squared_error.h"

namespace twobp {

namespace {

DecoderOptions llama_options(const MlpOptions& o) {
  DecoderOptions options;
  options.dim = o.dim;
  options.hidden = o.hidden;
  options.norm_eps = o.norm_eps;
  options.init_std = o.init_std;
  return filled_in(decoder_family("llama"), options);
}

}  // namespace

ModelSpec mlp(const MlpOptions& given, const BuildSettings& s) {
  const DecoderOptions o = llama_options(given);
  TWOBP_CHECK(given.layers >= 1 && o.dim >= 1 && o.hidden >= 1, "a stack of MLPs needs sizes of at least 1");
  ModelSpec model;
  model.input_field = "input";
  for (int64_t i = 0; i < given.layers; ++i) {
    const std::string block = "model.layers." + std::to_string(i);
    const bool last = i + 1 == given.layers;
    model.layers.push_back(
        {block + ".mlp", last ? "mlp with loss" : "mlp", [o, s, block, last]() -> std::unique_ptr<Layer> {
           auto half = decoder_mlp(decoder_family("llama"), o, s, block);
           if (!last) return half;
           return make_sequential(std::move(half), std::make_unique<SquaredError>());
         }});
  }
  return model;
}

ModelType mlp_type() {
  using O = MlpOptions;
  ModelType type = make_model_type<O>({
      TWOBP_KEY(O, dim, "width of the model").in("features").from(1, kMaxWidth),
      TWOBP_KEY(O, layers, "depth of the model").in("blocks").from(1, kMaxCount),
      TWOBP_KEY(O, hidden, "width of the MLP; 0: dim * 8 / 3 rounded up to a multiple of 64")
          .in("features")
          .from(0, 4 * kMaxWidth),
      TWOBP_KEY(O, norm_eps, "added to the mean square in RMSNorm").above(0),
      init_std_key<O>(),
  });
  type.input = [](const ModelOptions& o) {
    ModelInput input;
    input.kind = InputKind::kVectors;
    input.width = o.as<O>().dim;
    return input;
  };
  type.fill_in = [](ModelOptions& o) { o.as<O>().hidden = llama_options(o.as<O>()).hidden; };
  type.build = [](const ModelOptions& o, const BuildSettings& s) { return mlp(o.as<O>(), s); };
  return type;
}

}  // namespace twobp
