// RMSNorm of queries and keys before attention: of each head (Qwen3, arXiv 2505.09388; Gemma 3), or of all queries and
// all keys of a position (OLMo 2, arXiv 2501.00656). Takes the packed projections (B, S, (H + 2 K) D) = (q | k | v) and
// normalises q and k in place. q and k as they were are kept until backward-p1, which computes the gains' gradients in
// the same pass.
#pragma once

#include "twobp/nn/layers/rms_norm.h"

namespace twobp {

struct QueryKeyNormShape {
  int64_t heads = 1;     // H
  int64_t kv_heads = 1;  // K
  int64_t head_dim = 1;  // D
  bool whole = false;    // one norm over all heads of a position, in place of one for each head
};

class QueryKeyNorm : public Layer {
 public:
  // The weights are (D), or (H D) and (K D) if whole.
  QueryKeyNorm(const std::string& query, const std::string& key, const QueryKeyNormShape& shape, double eps,
               at::ScalarType dtype, GainForm form = GainForm::kWeight);

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void collect_parameters(std::vector<Parameter*>& parameters) override;
  bool takes_padded_rows() const override { return true; }

 private:
  // Norms of `cols` numbers each that lie side by side in a row: those of q, or those of k.
  struct Part {
    int64_t first;  // number of the row where they begin
    int64_t count;
    int64_t cols;
    int64_t first_norm;  // number of the row's first norm of this part
    RmsGain* gain;
  };
  std::vector<Part> parts();
  int64_t width() const { return (shape_.heads + shape_.kv_heads) * shape_.head_dim; }  // of q and k

  QueryKeyNormShape shape_;
  at::ScalarType dtype_;
  double eps_;
  RmsGain query_;
  RmsGain key_;
};

}  // namespace twobp
