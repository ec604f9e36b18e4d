// The inputs of a model, as far as its data must know them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/ATen.h>

namespace twobp {

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

}  // namespace twobp
