// BERT (arXiv 1810.04805) for masked language modelling from split layers: embeddings, then per block an
// attention half and an MLP half, each with the norm after it (layers of their own, so that a stage may end
// between them), then the head: dense, GELU, norm, decoder, cross-entropy at the labels that count. Parameter
// names are those of Hugging Face's BertForMaskedLM.
#pragma once

#include <ATen/ATen.h>

#include "twobp/nn/kernels/encoder/encoder_kernels.h"
#include "twobp/nn/layers/lora_linear.h"
#include "twobp/models/model.h"

namespace twobp {

struct BertOptions {
  int64_t vocab = 256;
  int64_t dim = 256;
  int64_t layers = 4;
  int64_t heads = 4;        // dim / heads is a head's width
  int64_t hidden = 1024;    // width of the MLP
  int64_t positions = 512;  // the longest sequence
  int64_t token_types = 2;
  GeluForm activation = GeluForm::kErf;
  double dropout = 0;            // of the embeddings and of each half's output
  double attention_dropout = 0;  // of attention's probabilities
  double norm_eps = 1e-12;
  bool tied = true;  // the decoder's matrix is that of the word embeddings; its bias is its own
  double init_std = 0.02;
  at::ScalarType dtype = at::kFloat;
  LoraOptions lora;  // with a rank, all but the adapters is to be frozen
};

// The batch's fields: input_ids, labels (B, S) int64; attention_mask and token_type_ids (B, S) int64 may be
// missing. Throws Error: sizes below 1, heads that do not divide dim, a dropout outside [0, 1).
ModelSpec bert(const BertOptions& options);

}  // namespace twobp
