// What multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) computes between the first projections
// and the scores: queries, keys and values of all heads from compressed ones.
//   q = up_q(norm(c_q)), or c_q itself        (k | v) of each head = up_kv(norm(c_kv))
// The last features of a head of q and k are those that the rotary embedding turns. All heads of k share theirs, r.
#pragma once

#include <memory>

#include "twobp/nn/layer.h"

namespace twobp {

struct LatentShape {
  int64_t heads = 1;         // H
  int64_t nope_dim = 1;      // features of a head of q and k that do not turn
  int64_t rope_dim = 2;      // R, those that do, even
  int64_t value_dim = 1;     // V
  int64_t q_rank = 0;        // width of c_q; 0: it is q
  int64_t kv_rank = 1;       // width of c_kv
  bool interleaved = false;  // features 2 i and 2 i + 1 of r turn together; else i and i + R / 2

  int64_t head_dim() const { return nope_dim + rope_dim; }  // D
  int64_t query_width() const { return q_rank > 0 ? q_rank : heads * head_dim(); }
  int64_t input() const { return query_width() + kv_rank + rope_dim; }
  int64_t packed() const { return heads * (2 * head_dim() + value_dim); }
};

class LatentProjections : public Layer {
 public:
  // `query` computes q (B, S, H D) from c_q; null without a q_rank. `key_value` computes (B, S, H (nope_dim + V)).
  LatentProjections(const LatentShape& shape, std::unique_ptr<Layer> query, std::unique_ptr<Layer> key_value);

  // (c_q | c_kv | r) (B, S, input()) -> (q | k | v) (B, S, H (2 D + V)), the rows of Attention. In them, features i and
  // i + R / 2 turn together.
  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override;
  void collect_parameters(std::vector<Parameter*>& parameters) override;

 private:
  // The parts of packed rows, each (B, S, H, its features): views.
  struct Parts;
  Parts parts_of(const at::Tensor& packed) const;
  // Copies features that turn into packed rows, or `back`.
  void copy_turning(const at::Tensor& to, const at::Tensor& from, bool back) const;

  LatentShape shape_;
  std::unique_ptr<Layer> query_, key_value_;
};

}  // namespace twobp
