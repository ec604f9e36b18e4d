// Layers in sequence. Hands out W one leaf layer at a time.
#pragma once

#include <memory>
#include <vector>

#include "twobp/nn/layer.h"

namespace twobp {

class Sequential : public Layer {
 public:
  explicit Sequential(std::vector<std::unique_ptr<Layer>> layers);

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override;
  void collect_parameters(std::vector<Parameter*>& parameters) override;
  bool takes_padded_rows() const override { return layers_.front()->takes_padded_rows(); }
  void pad_rows() override { layers_.back()->pad_rows(); }

 private:
  std::vector<std::unique_ptr<Layer>> layers_;
};

// Sequential from layers given one by one.
template <typename... Layers>
std::unique_ptr<Sequential> make_sequential(std::unique_ptr<Layers>... layers) {
  std::vector<std::unique_ptr<Layer>> list;
  (list.push_back(std::move(layers)), ...);
  return std::make_unique<Sequential>(std::move(list));
}

}  // namespace twobp
