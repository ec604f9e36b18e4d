// The model types other than decoders and captured modules, with their options; and keys of the configuration that
// types share.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "twobp/config/section.h"
#include "twobp/models/checked_json.h"
#include "twobp/models/model_type.h"

namespace twobp {

template <typename Options>
Key vocab_key() {
  return TWOBP_KEY(Options, vocab,
                   "size of the vocabulary; 256 for data.text without a tokenizer, whose tokens are bytes")
      .in("tokens")
      .from(1, kMaxLength);
}

template <typename Options>
Key pad_token_key() {
  return TWOBP_KEY(Options, pad_token, "id of the padding token, whose embedding is not trained; -1: none")
      .from(-1, kMaxLength);
}

template <typename Options>
Key init_std_key() {
  return TWOBP_KEY(Options, init_std, "standard deviation of the initial weights")
      .at_least(0)
      .freely_tuned()
      .free_on_resume();
}

inline Key dropout_key(Key key) {
  return std::move(key).from_to_below(0, 1).freely_tuned();
}

// The padding token of a model. transformers gives its embedding no gradient.

// Reads pad_token_id as transformers does: a negative one counts from the end of the vocabulary. Returns `otherwise` if
// the file does not have the key, and -1 if it is null. Throws Error if it is outside the vocabulary.
int64_t read_pad_token(const CheckedJson& file, int64_t vocab, int64_t otherwise = -1);

// Adds pad_token_id unless the file has it. -1 becomes null, because some models of transformers have another default.
void write_pad_token(int64_t pad_token, nlohmann::json& out);

// Throws Error if model.pad_token is outside the vocabulary.
void check_pad_token(int64_t pad_token, int64_t vocab);

// BERT (arXiv 1810.04805) for masked language modelling, made of split layers: embeddings, blocks and a head. A block
// is an attention half and an MLP half, each followed by its norm. The halves are separate layers, so that a stage may
// end between them. The head is dense, GELU, norm, decoder, and cross-entropy at the labels that count. Parameter names
// are those of Hugging Face's BertForMaskedLM.
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

// Mamba (arXiv 2312.00752) as a language model: an embedding, blocks and a head. A block is norm, mixer and residual,
// split into two layers (up to the mixer's first projection, and the rest). The head is norm, projection and
// cross-entropy. Parameter names are those of Hugging Face's MambaForCausalLM.
struct MambaOptions {
  static constexpr const char* kType = "mamba";

  int64_t dim = 256;
  int64_t layers = 4;
  int64_t vocab = 256;
  double norm_eps = 1e-5;
  bool tied = false;        // the head's projection shares the embedding matrix
  int64_t state = 16;       // numbers per channel of the scan
  int64_t conv_kernel = 4;  // positions
  int64_t expand = 2;       // channels of the scan: expand * dim
  int64_t dt_rank = 0;      // width of the steps' projection; 0: dim / 16 rounded up
  double init_std = 0.02;
};

ModelSpec mamba(const MambaOptions& options, const BuildSettings& settings = {});

ModelType mamba_type();

// A stack of identical MLP halves of LLaMa blocks with a squared error at the end. It gives equal stages for
// benchmarks.
struct MlpOptions {
  static constexpr const char* kType = "mlp";

  int64_t dim = 256;
  int64_t layers = 4;
  int64_t hidden = 0;  // 0: dim * 8 / 3 rounded up to a multiple of 64
  double norm_eps = 1e-5;
  double init_std = 0.02;
};

// Reads `input` (B, S, dim) or (B, dim) and `target` of the same shape.
ModelSpec mlp(const MlpOptions& options, const BuildSettings& settings = {});

ModelType mlp_type();

// ResNet (arXiv 1512.03385) of 18 to 152 layers and any other depth: a stem, residual blocks, and a classifier with its
// loss. Each block is a layer of the model. Reads `pixel_values` (B, channels, H, W) and `labels` (B) int64. Parameter
// names are those of Hugging Face's ResNetForImageClassification; torchvision's are accepted too.
struct ResnetOptions {
  static constexpr const char* kType = "resnet";

  int64_t classes = 1000;
  int64_t channels = 3;  // of the pictures
  int64_t stem = 64;     // channels of the first convolution
  // false: the first convolution is 7 x 7 with stride 2 and max pooling, which reduces height and width to a quarter.
  // true: it is 3 x 3 with stride 1, for pictures of 28 or 32 pixels.
  bool small_images = false;
  std::string block = "bottleneck";        // bottleneck, basic
  std::vector<int> depths = {3, 4, 6, 3};  // blocks of each stage; every stage but the first halves height and width
  std::vector<int> widths;                 // channels of each stage; empty: as in the paper
};

// Throws Error if there is no stage, the numbers of widths and depths differ, a count is below 1, or a bottleneck's
// width is no multiple of 4.
ModelSpec resnet(const ResnetOptions& options, const BuildSettings& settings = {});

ModelType resnet_type();

}  // namespace twobp
