// Code that the tests of Mamba's layers share: the scan with its inputs in one tensor, and special parameters. The
// initial ones test too little: A is the same in all channels, and the steps are small.
#pragma once

#include "tests/nn/layer_test_util.h"
#include "twobp/nn/layer.h"
#include "twobp/nn/layers/lora_linear.h"
#include "twobp/nn/layers/mamba_mixer.h"

namespace twobp::test {

inline void make_telling(Layer& layer) {
  std::vector<Parameter*> parameters;
  layer.collect_parameters(parameters);
  for (Parameter* parameter : parameters) {
    if (parameter->name().ends_with("A_log")) {
      parameter->initialize_with([](at::Tensor& rows, at::Generator& generator) { rows.normal_(0, 0.5, generator); });
    } else if (parameter->name().ends_with("dt_proj.bias")) {
      parameter->initialize_with([](at::Tensor& rows, at::Generator&) { rows.zero_(); });
    }
  }
}

// The whole mixer: its first projection, followed by the rest, which is a separate layer.
inline std::unique_ptr<Layer> whole_mixer(const std::string& name, const MambaMixerShape& shape, double init_std,
                                          at::ScalarType dtype) {
  return make_sequential(make_linear({{name + ".in_proj.weight", 2 * shape.inner}}, shape.dim, init_std, dtype, {}),
                         std::make_unique<MambaMixer>(name, shape, init_std, dtype));
}

// (x | raw | B | C | z) in the last dimension, so the rows of each part are separated.
class PackedScan : public Layer {
 public:
  PackedScan(int64_t channels, int64_t state, at::ScalarType dtype)
      : channels_(channels), state_(state), scan_("mixer", channels, state, dtype) {
    make_telling(scan_);
  }

  Values forward(Values packed, Context& context, Saved& saved) override {
    const at::Tensor& all = packed[0];
    return scan_.forward(
        {all.narrow(2, 0, channels_), all.narrow(2, channels_, channels_), all.narrow(2, 2 * channels_, 2 * state_),
         all.narrow(2, 2 * channels_ + 2 * state_, channels_)},
        context, saved);
  }
  Values backward_p1(Values dy, Context& context, Saved& saved) override {
    const Values gradients = scan_.backward_p1(std::move(dy), context, saved);
    return {at::cat({gradients[0], gradients[1], gradients[2], gradients[3]}, 2)};
  }
  void collect_parameters(std::vector<Parameter*>& parameters) override { scan_.collect_parameters(parameters); }

 private:
  int64_t channels_;
  int64_t state_;
  SelectiveScan scan_;
};

}  // namespace twobp::test
