// Embeddings: of tokens, of learned positions, and BERT's sum of both and of token types.
#pragma once

#include "twobp/nn/layer.h"
#include "twobp/nn/layers/dropout.h"
#include "twobp/nn/layers/norms.h"

namespace twobp {

class Embedding : public Layer {
 public:
  // `padding`: the token without a gradient; -1: none.
  Embedding(std::string name, int64_t vocab, int64_t dim, double init_std, at::ScalarType dtype, int64_t padding = -1,
            double scale = 1);

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void backward_p2(std::span<Saved* const> saved) override;
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override;
  bool p2_reads_other_weights() const override { return false; }
  void collect_parameters(std::vector<Parameter*>& parameters) override;

 private:
  Parameter weight_;  // (vocab, dim)
  int64_t padding_;
  double scale_;
};

// y = x + P[position]: x (B, S, C), a learned vector for each position (GPT-2). Positions count from the first column,
// or from where a packed document begins (documents.h). Backward-p1 adds the sum over the batch to the vectors'
// gradient, so no work remains for backward-p2.
class LearnedPositions : public Layer {
 public:
  LearnedPositions(std::string name, int64_t positions, int64_t dim, double init_std, at::ScalarType dtype);

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void collect_parameters(std::vector<Parameter*>& parameters) override;

 private:
  Parameter weight_;  // (positions, dim)
};

// BERT's input: y = dropout(LayerNorm(word[input_ids] + position[0, 1, ...] + type[token_type_ids])), from the batch's
// fields input_ids and token_type_ids (B, S) int64 -> (B, S, C). Missing token_type_ids count as
// 0. This is the first layer of a model, so it has no input values. Backward-p2 adds the rows of the sum's gradient in
// order, including those of repeated tokens.
struct BertEmbeddingShape {
  int64_t vocab = 1;
  int64_t positions = 1;  // length of the longest sequence
  int64_t types = 1;
  int64_t dim = 1;       // C
  int64_t padding = -1;  // the token whose word embedding has no gradient; -1: none
};

class BertEmbedding : public Layer {
 public:
  // `prefix`: "bert.embeddings".
  BertEmbedding(const std::string& prefix, const BertEmbeddingShape& shape, double eps, double dropout, double init_std,
                at::ScalarType dtype);

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void backward_p2(std::span<Saved* const> saved) override;
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override;
  bool p2_reads_other_weights() const override { return false; }
  void collect_parameters(std::vector<Parameter*>& parameters) override;

 private:
  // Makes the function that computes rows of `sum`: the sum of the three tables' rows for the ids, the types
  // (undefined: all 0) and the positions.
  LayerNormRows::Rows gather(const at::Tensor& ids, const at::Tensor& types, at::Tensor& sum) const;
  bool has_p2() const { return words_.trainable() || positions_.trainable() || types_.trainable(); }

  Parameter words_;      // (vocab, C)
  Parameter positions_;  // (positions, C)
  Parameter types_;      // (types, C)
  int64_t padding_;
  LayerNormRows norm_;
  DropoutRate rate_;
};

}  // namespace twobp
