// A family of decoders: a model_type of Hugging Face. The properties that all its models share are members here. The
// properties that vary are options, each a key of config.json. If the options that exist suffice,
// a new family needs only an entry in the table of families.cpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "twobp/config/section.h"
#include "twobp/models/decoder/options.h"
#include "twobp/models/model_type.h"
#include "twobp/models/model_weights.h"
#include "twobp/nn/layers/attention.h"

namespace twobp {

// How a number in config.json is converted to an option's value.
enum class FileForm : uint8_t {
  kSame,
  kOrNull,       // 0 is written as null
  kInverse,      // the option is 1 / the number
  kInverseRoot,  // the option is 1 / sqrt(the number)
  kTanhGelu,     // "gelu" stands for its approximation by tanh
  kWithLogits,   // if the key output_router_logits is true, else the option is 0
  kOrZero,       // 0 may be given
  kLimited,      // the name of a choice, "group_limited_greedy" with several groups and "greedy" with one
};

// A key of config.json. It is read into an option and written from it. A key that is null gives 0, false or "". Several
// keys of one option must agree, and several options of one key too.
struct FileKey {
  const char* name;
  const char* option;               // of DecoderOptions; nullptr: must have the value `otherwise`
  const char* otherwise = nullptr;  // what transformers takes if the key is missing, as JSON; nullptr: an error
  FileForm form = FileForm::kSame;
  const char* also = nullptr;  // its name in other files
};

// How config.json gives the windows of the layers.
enum class WindowsInFile : uint8_t {
  kNone,         // there are none
  kEvery,        // sliding_window is that of all layers
  kSwitched,     // with use_sliding_window, that of layer_types or of the layers from max_window_layers on
  kAlternating,  // that of layer_types or of all layers but each sliding_window_pattern-th
  kNotRotary,    // with use_sliding_window, that of layer_types or of layers without rotary embedding
};

// The tensors' names without .weight and .bias; of a block, after the block's. "": there is no such tensor.
struct DecoderNames {
  std::string embedding = "model.embed_tokens";
  std::string positions{};
  std::string blocks = "model.layers.";
  std::string attention_norm = "input_layernorm";
  std::string attention_after_norm{};
  // Or one. Of latent attention: queries to q_rank and from it, queries without it, keys and values to kv_rank and from
  // it.
  std::vector<std::string> qkv = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"};
  std::string query_norm{};
  std::string key_norm{};
  std::string sinks{};
  std::string attention_output = "self_attn.o_proj";
  std::string mlp_norm = "post_attention_layernorm";
  std::string mlp_after_norm{};
  std::vector<std::string> mlp_input = {"mlp.gate_proj", "mlp.up_proj"};  // or one
  std::string mlp_output = "mlp.down_proj";
  std::string router = "mlp.gate";
  std::string experts = "mlp.experts.";
  std::vector<std::string> expert = {"gate_proj", "up_proj", "down_proj"};
  // Of gate and up, and of down of all experts, for their adapters: parameters of modules of transformers.
  std::vector<std::string> expert_modules = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"};
  // Tensors of all experts, which files may have in place of those of each: of gate and up, and of down.
  std::vector<std::string> stacks = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"};
  std::string shared_expert = "mlp.shared_expert.";
  std::string shared_gate = "mlp.shared_expert_gate";
  std::string correction{};  // added to experts' scores where they are chosen; not trained
  std::string norm = "model.norm";
  std::string head = "lm_head";
};

struct DecoderFamily {
  enum class Norm : uint8_t { kRms, kRmsOnePlus, kLayerNorm };

  std::string name;  // model.type, and model_type of config.json
  std::string hf_class;
  std::vector<FileKey> file{};
  DecoderNames names{};
  DecoderOptions defaults{};  // of a new model; for options without a key of the file, those of all models

  Norm norm = Norm::kRms;
  bool gated = true;               // act(gate) * up; else act(up)
  bool whole_head_norm = false;    // one query-key norm over all heads of a position
  bool output_bias = true;         // attention_bias is also that of attention's output
  bool interleaved = false;        // q, k and v of a head lie side by side
  bool latent = false;             // attention of compressed queries, keys and values
  bool transposed = false;         // weights of the blocks are (in, out)
  bool scaled_embedding = false;   // by sqrt(dim)
  bool embedding_dropout = false;  // `dropout` also acts after the embedding
  bool equal_heads = false;        // transformers wants dim to be a multiple of heads
  bool biased_experts = false;     // router and experts have biases
  bool sigmoid_scores = false;     // of the router
  double gate_limit = 0;           // of experts, see ExpertsShape
  bool saves_stacks = false;       // files have the stacks of experts
  bool stacks_in_out = false;      // which are (experts, in, out), with gate and up taking turns

  bool rotary = true;
  std::vector<std::string> scalings = {"linear", "llama3", "yarn", "dynamic"};  // of rope_scaling
  bool local_rope = false;             // layers with a window have a theta of their own
  const char* theta = "rope_theta";    // the keys of config.json, beside rope_parameters
  const char* default_rope = nullptr;  // rope_parameters of files without them, as JSON; nullptr: no stretching
  const char* part = nullptr;          // of the part of a head that turns; nullptr: all of it
  double default_theta = 10000;
  double default_part = 1;
  WindowsInFile windows = WindowsInFile::kNone;
  const char* default_window = "null";  // as JSON
  int64_t window_pattern = 2;           // of kAlternating
  bool has_pad_token = true;            // its embedding is not trained
  int64_t default_pad_token = -1;
  std::vector<const char*> ignored = {};                       // further keys of config.json that change nothing here
  std::string (*rename)(const std::string& stored) = nullptr;  // see TensorNames

  bool scales(std::string_view scaling) const {
    return std::find(scalings.begin(), scalings.end(), scaling) != scalings.end();
  }
};

const std::vector<DecoderFamily>& decoder_families();

// Throws Error if the name is unknown.
const DecoderFamily& decoder_family(const std::string& name);

// Whether the family's models differ in this option, so that it is a key of theirs.
bool has_option(const DecoderFamily& family, const std::string& option);

// Every key, of which a family has some.
std::vector<Key> decoder_keys();

// The options with the defaults that follow from others: heads, widths.
DecoderOptions filled_in(const DecoderFamily& family, DecoderOptions options);

// Throws Error for contradictions between options.
void check_decoder(const DecoderFamily& family, const DecoderOptions& options);

// A layer's entry of a cyclic list; `otherwise` if the list is empty.
int cyclic(const std::vector<int>& list, int64_t layer, int otherwise);

// The shape of a layer's attention. The options are filled in.
AttentionShape attention_shape(const DecoderFamily& family, const DecoderOptions& options, int64_t layer);

// The features of a head that turn. The options are filled in.
int64_t rotary_dims(const DecoderFamily& family, const DecoderOptions& options);

// Decoders of text (LLaMa, arXiv 2302.13971, and its relatives), made of split layers: an embedding, blocks and a head.
// A block is an attention half and an MLP half. The halves are separate layers, so that a stage may end between them.
// The head is norm, projection and cross-entropy. family.h has the differences between the families.

// Throws Error for sizes below 1.
ModelSpec decoder(const DecoderFamily& family, const DecoderOptions& options, const BuildSettings& settings = {});
ModelSpec llama(const DecoderOptions& options, const BuildSettings& settings = {});

// The MLP half of a block, with its norms and the residual. The options are filled in.
std::unique_ptr<Layer> decoder_mlp(const DecoderFamily& family, const DecoderOptions& options,
                                   const BuildSettings& settings, const std::string& block);

// A model type for each family, in the order of the table.
std::vector<ModelType> decoder_types();

// The tensors of a decoder's Hugging Face directory that are not its parameters, or have other names.

// The options are filled in.
TensorNames decoder_names(const DecoderFamily& family, const DecoderOptions& options);

}  // namespace twobp
