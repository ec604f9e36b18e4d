// Tokenized training data: a folder of NumPy arrays.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "twobp/data/data.h"
#include "twobp/files/npy.h"
#include "twobp/nn/context.h"

namespace twobp {

// The label that position t of a model predicts.
enum class LabelOf : uint8_t {
  kNextToken,  // a language model: label t + 1
  kSameToken,  // a masked language model: label t
};

// Reads `input_ids.npy` (N, S) and `labels.npy` (N, S), of any integer type. Labels are as in `transformers`:
// label t belongs to token t itself, and -100 is not counted. For a language model the `labels` field is
// shifted: position t predicts label t + 1, and the last position predicts nothing. For a masked model it is
// not shifted. The optional `attention_mask.npy` (N, S), 1 or 0, becomes a field of that name. So does for a
// masked model `token_type_ids.npy` (N, S), and for a model that keeps documents apart `document_starts.npy`
// (N, S): where each position's document begins; no label crosses into another one.
class ArrayDataset : public Dataset {
 public:
  // Throws Error if a file is missing or damaged (see NpyArray), not two-dimensional, not of integers, or of
  // another shape than the other; if S != sequence; if a token or label is outside [0, vocab) (file, row,
  // column, value); if no label is counted; if a mask is neither 0 nor 1 or masks a whole sample; if a token
  // type is outside [0, token_types); for a language model if a padded position has a label; or if the folder
  // has a .npy or .npz file that is not read.
  ArrayDataset(const std::string& folder, int64_t sequence, int64_t vocab, LabelOf label_of = LabelOf::kNextToken,
               int64_t token_types = 2, bool documents = false);

  int64_t size() const override { return input_.shape()[0]; }
  Fields read(const std::vector<int64_t>& indices, int64_t epoch) const override;
  // With documents: the pairs of positions within one document, to which attention's time is in proportion.
  int64_t cost(int64_t sample) const override;

 private:
  // Opens an array of the samples' shape with values in [0, values). None if the file does not exist.
  std::optional<NpyArray> open_optional(const std::string& folder, const std::string& name, int64_t values,
                                        const char* what, const char* remedy) const;

  NpyArray input_;
  NpyArray labels_;
  LabelOf label_of_;
  std::map<std::string, NpyArray> optional_;  // by name of the field
};

// Throws Error for a .npy file in the folder whose name is not one of `read`, and for any .npz file: their
// author gave them a meaning.
void refuse_other_arrays(const std::string& folder, const std::vector<std::string>& read,
                         const std::string& model_type);

// The data of a captured model: an array for each of its fields, or text that it predicts itself.
// Reads NAME.npy for each field, of shape (samples, the field's other sizes). Numbers are converted to the
// field's dtype: integers to any, floating-point numbers to floating-point ones.
class FieldDataset : public Dataset {
 public:
  // Throws Error if a file is missing or damaged (see NpyArray), or of another shape or kind of number than
  // the field; if the arrays differ in their samples; if the folder has an array that is no field; or if a
  // field has no dimension for samples.
  FieldDataset(const std::string& folder, const std::vector<FieldInput>& fields);

  int64_t size() const override { return arrays_.front().second.shape()[0]; }
  Fields read(const std::vector<int64_t>& indices, int64_t epoch) const override;

 private:
  std::vector<std::pair<FieldInput, NpyArray>> arrays_;
};

// The samples of a language model whose loss shifts the labels itself: labels[b, t] is the token at position
// t, or -100 where it is not counted.
class UnshiftedLabels : public Dataset {
 public:
  explicit UnshiftedLabels(std::shared_ptr<const Dataset> tokens) : tokens_(std::move(tokens)) {}

  int64_t size() const override { return tokens_->size(); }
  Fields read(const std::vector<int64_t>& indices, int64_t epoch) const override;
  int64_t cost(int64_t sample) const override { return tokens_->cost(sample); }

 private:
  std::shared_ptr<const Dataset> tokens_;
};

// Whether the fields are those of a language model: `input_ids` and `labels` (B, S) of int64.
bool are_tokens(const std::vector<FieldInput>& fields);

// The labels of a model that predicts the next token. Users give label t for token t, as for transformers.
// The model reads, for each position, the label that the position predicts.
// Moves `labels` (B, S) of the fields to the positions that predict them. The last position predicts nothing,
// and neither does the last of a document, if there are `document_starts`. Throws Error for labels of another
// shape.
Fields to_predicting_positions(Fields fields);

}  // namespace twobp
