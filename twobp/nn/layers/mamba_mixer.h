// Mamba's mixer (arXiv 2312.00752, figure 3) after its first projection, (u | z) = in_proj(x). That projection is a
// layer of its own, because it is about half of the work. (u | z) (B, S, 2 * inner) -> (B, S, dim):
//   u = conv1d(u)     (dt | B | C) = x_proj(u)     y = scan(u, dt_proj(dt), B, C, z)     out_proj(y)
// This is a container that hands out W projection by projection. Gradients overwrite their values, so that backward-p1
// needs little additional memory. The gradient of (u | z) overwrites its value if no other object holds it.
//
// At the batch's padding (padding.h), (u | z) and the convolution's output are 0, as in transformers. in_proj has no
// bias, so this is its output for an input of 0.
#pragma once

#include "twobp/nn/layers/causal_conv1d.h"
#include "twobp/nn/layers/lora_linear.h"
#include "twobp/nn/layers/selective_scan.h"

namespace twobp {

struct MambaMixerShape {
  int64_t dim = 256;
  int64_t inner = 512;      // channels of the convolution and the scan
  int64_t state = 16;       // numbers per channel
  int64_t conv_kernel = 4;  // positions
  int64_t dt_rank = 16;     // width of dt before dt_proj
};

class MambaMixer : public Layer {
 public:
  // Parameters have Hugging Face's names: `name`.conv1d.weight, .A_log and so on. The bias of dt_proj belongs to the
  // scan.
  MambaMixer(const std::string& name, const MambaMixerShape& shape, double init_std, at::ScalarType dtype,
             const LoraOptions& lora = {});

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override;
  void collect_parameters(std::vector<Parameter*>& parameters) override;

 private:
  MambaMixerShape shape_;
  CausalConv1d conv_;
  std::unique_ptr<Layer> x_proj_;
  std::unique_ptr<Layer> dt_proj_;
  SelectiveScan scan_;
  std::unique_ptr<Layer> out_proj_;
};

}  // namespace twobp
