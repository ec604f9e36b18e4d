// A stack of identical MLP blocks with a squared error: equal stages, for benchmarks.
#include "twobp/models/llama.h"
#include "twobp/models/types/all.h"

namespace twobp {
namespace {

ModelSpec build(const ModelConfig& config, at::ScalarType dtype) {
  MlpOptions options;
  options.dim = config.dim;
  options.layers = config.layers;
  options.hidden = mlp_width(config.hidden, config.dim);
  options.norm_eps = config.norm_eps;
  options.init_std = config.init_std;
  options.dtype = dtype;
  return mlp(options);
}

}  // namespace

int64_t mlp_width(int64_t hidden, int64_t dim) {
  return hidden > 0 ? hidden : (dim * 8 / 3 + 63) / 64 * 64;
}

Architecture mlp_architecture() {
  Architecture mlp;
  mlp.type = "mlp";
  mlp.input = ModelInput::kVectors;
  mlp.fill_in = [](ModelConfig& config) { config.hidden = mlp_width(config.hidden, config.dim); };
  mlp.check = [](const ModelConfig&) {};
  mlp.build = build;
  return mlp;
}

}  // namespace twobp
