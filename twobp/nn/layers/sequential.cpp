#include "twobp/nn/layers/sequential.h"

#include "twobp/core/check.h"

namespace twobp {

Sequential::Sequential(std::vector<std::unique_ptr<Layer>> layers) : layers_(std::move(layers)) {
  TWOBP_CHECK(!layers_.empty(), "Sequential needs at least one layer");
  for (size_t i = 0; i + 1 < layers_.size(); ++i) {
    if (layers_[i + 1]->takes_padded_rows()) layers_[i]->pad_rows();
  }
}

Values Sequential::forward(Values x, Context& context, Saved& saved) {
  for (size_t i = 0; i < layers_.size(); ++i) x = layers_[i]->forward(std::move(x), context, saved.child(i));
  return x;
}

Values Sequential::backward_p1(Values dy, Context& context, Saved& saved) {
  for (size_t i = layers_.size(); i-- > 0;) {
    dy = layers_[i]->backward_p1(std::move(dy), context, saved.child(i));
    saved.child(i).release_p1();
  }
  return dy;
}

void Sequential::collect_p2(Saved& saved, std::vector<P2Unit>& units) {
  for (size_t i = layers_.size(); i-- > 0;) layers_[i]->collect_p2(saved.child(i), units);
}

void Sequential::collect_parameters(std::vector<Parameter*>& parameters) {
  for (auto& layer : layers_) layer->collect_parameters(parameters);
}

}  // namespace twobp
