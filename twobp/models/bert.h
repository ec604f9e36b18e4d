// BERT (arXiv 1810.04805) for masked language modelling, made of split layers: embeddings, blocks and a head. A block
// is an attention half and an MLP half, each followed by its norm. The halves are separate layers, so that a stage may
// end between them. The head is dense, GELU, norm, decoder, and cross-entropy at the labels that count. Parameter names
// are those of Hugging Face's BertForMaskedLM.
#pragma once

#include <cstdint>
#include <string>

#include "twobp/models/model_type.h"

namespace twobp {

struct BertOptions {
  static constexpr const char* kType = "bert";

  int64_t dim = 256;
  int64_t layers = 4;
  int64_t heads = 4;   // dim / heads is a head's width
  int64_t hidden = 0;  // width of the MLP; 0: 4 * dim
  int64_t vocab = 256;
  double norm_eps = 1e-5;
  bool tied = false;        // the decoder shares the matrix of the word embeddings, but not the bias
  int64_t positions = 512;  // longest sequence
  int64_t token_types = 2;
  std::string activation = "gelu";  // gelu, gelu_tanh
  double dropout = 0;               // of the embeddings and of each half's output
  double attention_dropout = 0;     // of attention's probabilities
  int64_t pad_token = -1;           // its embedding is not trained; -1: none
  double init_std = 0.02;
};

// The batch's fields are input_ids and labels (B, S) int64, and optionally attention_mask and token_type_ids (B, S)
// int64. Throws Error for sizes below 1, heads that do not divide dim, or a dropout outside [0, 1).
ModelSpec bert(const BertOptions& options, const BuildSettings& settings = {});

ModelType bert_type();

}  // namespace twobp
