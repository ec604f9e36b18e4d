// The section `data` of the configuration, and what data must know of the model's inputs.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/ATen.h>

#include "twobp/config/section.h"

namespace twobp {

// The inputs of a model, as far as its data must know them.
enum class InputKind : uint8_t {
  kTokens,        // input_ids; labels are the following tokens
  kMaskedTokens,  // input_ids; labels are the masked tokens
  kImages,        // pixel_values; labels are classes
  kVectors,       // input, target
  kFields,        // the tensors in ModelInput::fields
};

// The name of the unit in which a Batch counts `tokens`: "tokens", "images", "vectors".
std::string_view item_name(InputKind kind);

// A field of every micro-batch.
struct FieldInput {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;  // with the samples of a micro-batch first
};

struct ModelInput {
  InputKind kind = InputKind::kTokens;
  int64_t vocab = 256;               // of tokens
  int64_t channels = 3;              // of pictures
  int64_t classes = 1000;            // of pictures
  int64_t width = 256;               // of vectors
  int64_t token_types = 0;           // of token_type_ids; 0: not read
  int64_t longest = 0;               // longest sequence; 0: any
  bool documents = false;            // reads document_starts (nn/layers/attention_inputs.h)
  std::vector<FieldInput> fields{};  // of kFields
  std::string type = "llama";        // model.type, for messages
  std::string from;                  // model.from, which may contain a tokenizer; empty: a new model
};

struct DataConfig {
  std::string text;         // glob of plain text files
  std::string tokenizer;    // tokenizer.json, or a folder with one, for data.text;
                            // empty: that of model.from if it has one, else tokens are bytes
  std::string cache;        // folder for tokenized text; empty: twobp in the user's cache folder
  bool end_of_text = true;  // the tokenizer's end-of-text token follows each file, if it has one
  std::string tokens;       // glob of token files: numbers of token_type one after the other, little-endian
  std::string token_type;   // uint16, uint32; empty: that of the files' headers, else uint16
  std::string arrays;       // folder with input_ids.npy or pixel_values.npy, and labels.npy
  std::string synthetic;    // "tokens", "images" or "vectors": seeded random input, for benchmarks
  int64_t sequence = 256;   // tokens
  bool shuffle = true;
  double held_out = 0.05;          // fraction of the samples kept for evaluation: of text from the end, of pictures
                                   // from each class, unless data.arrays/held_out has others
  int workers = 1;                 // threads that read batches ahead
  double mask_probability = 0.15;  // masked language models: fraction of the tokens to hide
  int64_t image_size = 0;          // pixels, height and width; 0: those of the arrays; 224 for synthetic ones
  std::string crop;                // none, shift, resized: see image_transform.h; empty: none
  int64_t padding = 4;             // pixels, of crop shift
  bool flip = false;               // mirrors pictures left to right with probability 1/2
  // `mean` is subtracted from a pixel (0 to 1), and the result is divided by `std`. Each has one value, or
  // one per channel. If empty: measured for bytes, none for floats.
  std::vector<double> mean;
  std::vector<double> std;
};

const Section& data_section();

// Checks that one source of data is set and that the model can read it; open_data checks the contents. Throws
// Error.
void check_data(const DataConfig& data, const ModelInput& model);

// The names of the keys that the source of data does not use for this model, whatever their values: "crop".
std::vector<std::string> unused_keys(const DataConfig& data, const ModelInput& model);
// Throws Error if one of them has another value than its default. Defaults are allowed, so that a fully
// printed configuration can be read again.
void check_used_keys(const DataConfig& data, const ModelInput& model);

// The tokenizer.json of data.text: the one that data.tokenizer names or, if it is empty, the one in the
// folder model.from. Empty if there is none; tokens are then bytes.
std::string tokenizer_of(const DataConfig& data, const ModelInput& model);

}  // namespace twobp
