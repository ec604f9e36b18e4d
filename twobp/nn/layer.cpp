#include "twobp/nn/layer.h"

namespace twobp {

void Layer::backward_p2(std::span<Saved* const>) {}
void Layer::collect_p2(Saved&, std::vector<P2Unit>&) {}
void Layer::collect_parameters(std::vector<Parameter*>&) {}

std::vector<Parameter*> parameters_of(Layer& layer) {
  std::vector<Parameter*> parameters;
  layer.collect_parameters(parameters);
  return parameters;
}

}  // namespace twobp
