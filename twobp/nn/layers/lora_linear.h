// A frozen Linear with low-rank adapters on some of its parts (LoRA, arXiv 2106.09685, eq. 3):
//   y = x W^T + s x A^T B^T for a part's rows,  s = alpha / rank,  A (rank, in), B (out, rank), B starts as 0
//   p1: dx = dy W + v A,  v = s dy B        p2: dA += v^T x,  dB += s dy^T u,  u = x A^T
// Only the adapters are trained.
#pragma once

#include "twobp/nn/layers/linear.h"

namespace twobp {

struct LoraOptions {
  int64_t rank = 0;  // 0: no adapters
  double alpha = 16;
  std::vector<std::string> targets;  // endings of the parts' names without ".weight": "q_proj"

  double scale() const { return alpha / static_cast<double>(rank); }
};

// "model.layers.0.self_attn.q_proj.weight" -> "model.layers.0.self_attn.q_proj"
std::string module_of(const std::string& weight_name);
// True for names such as "model.layers.0.self_attn.q_proj.lora_A.weight".
bool is_adapter(const std::string& parameter_name);

class LoraLinear : public Layer {
 public:
  LoraLinear(const std::vector<ParameterPart>& parts, int64_t in, double init_std, at::ScalarType dtype,
             const LoraOptions& lora, bool bias = false, bool transposed = false);
  // Whether one of the parts is a target.
  static bool adapts(const std::vector<ParameterPart>& parts, const LoraOptions& lora);

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void backward_p2(std::span<Saved* const> saved) override;
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override;
  bool p2_reads_other_weights() const override { return false; }
  void collect_parameters(std::vector<Parameter*>& parameters) override;

 private:
  struct Adapter {
    Parameter a;      // (rank, in)
    Parameter b;      // (rows, rank)
    int64_t row = 0;  // first row of the part in the packed weight
    int64_t rows = 0;
  };

  // Whether an adapter is trained. If none is, nothing is kept and there is no W.
  bool trainable() const;

  Linear base_;
  double scale_;
  std::vector<std::unique_ptr<Adapter>> adapters_;
};

// A LoraLinear if one of the parts is a target, otherwise a trainable Linear.
std::unique_ptr<Layer> make_linear(const std::vector<ParameterPart>& parts, int64_t in, double init_std,
                                   at::ScalarType dtype, const LoraOptions& lora, bool bias = false,
                                   bool transposed = false);

}  // namespace twobp
