#include "twobp/models/mlp.h"

#include "twobp/core/check.h"
#include "twobp/models/common_keys.h"
#include "twobp/nn/layers/residual.h"
#include "twobp/nn/layers/rms_norm.h"
#include "twobp/nn/layers/sequential.h"
#include "twobp/nn/layers/squared_error.h"
#include "twobp/nn/layers/swiglu.h"

namespace twobp {

int64_t mlp_width(int64_t hidden, int64_t dim) {
  return hidden > 0 ? hidden : (dim * 8 / 3 + 63) / 64 * 64;
}

std::unique_ptr<Layer> mlp_half(const std::string& block, const MlpOptions& o, const BuildSettings& s) {
  const std::string projections = block + ".mlp.";
  std::vector<ParameterPart> gate_up = {{projections + "gate_proj.weight", o.hidden},
                                        {projections + "up_proj.weight", o.hidden}};
  return std::make_unique<Residual>(make_sequential(
      std::make_unique<RmsNorm>(block + ".post_attention_layernorm.weight", o.dim, o.norm_eps, s.dtype),
      make_linear(gate_up, o.dim, o.init_std, s.dtype, s.lora), std::make_unique<SwiGlu>(),
      make_linear({{projections + "down_proj.weight", o.dim}}, o.hidden, o.init_std, s.dtype, s.lora)));
}

ModelSpec mlp(const MlpOptions& given, const BuildSettings& s) {
  MlpOptions o = given;
  o.hidden = mlp_width(o.hidden, o.dim);
  TWOBP_CHECK(o.layers >= 1 && o.dim >= 1 && o.hidden >= 1, "a stack of MLPs needs sizes of at least 1");
  ModelSpec model;
  model.input_field = "input";
  for (int64_t i = 0; i < o.layers; ++i) {
    const std::string block = "model.layers." + std::to_string(i);
    const bool last = i + 1 == o.layers;
    model.layers.push_back(
        {block + ".mlp", last ? "mlp with loss" : "mlp", [o, s, block, last]() -> std::unique_ptr<Layer> {
           if (!last) return mlp_half(block, o, s);
           return make_sequential(mlp_half(block, o, s), std::make_unique<SquaredError>());
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
  type.fill_in = [](ModelOptions& o) { o.as<O>().hidden = mlp_width(o.as<O>().hidden, o.as<O>().dim); };
  type.build = [](const ModelOptions& o, const BuildSettings& s) { return mlp(o.as<O>(), s); };
  return type;
}

}  // namespace twobp
