// Tokenized training data: a folder of NumPy arrays.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "twobp/data/data.h"
#include "twobp/files/npy.h"

namespace twobp {

// The label that position t of a model predicts.
enum class LabelOf : uint8_t {
  kNextToken,  // a language model: label t + 1
  kSameToken,  // a masked language model: label t
};

// Reads `input_ids.npy` (N, S) and `labels.npy` (N, S), of any integer type. Labels are as in `transformers`: label t
// belongs to token t itself, and -100 is not counted. For a language model the `labels` field is shifted: position t
// predicts label t + 1, and the last position predicts nothing. For a masked model it is not shifted. The optional
// `attention_mask.npy` (N, S), 1 or 0, becomes a field of that name, and for a masked model so does
// `token_type_ids.npy` (N, S).
class ArrayDataset : public Dataset {
 public:
  // Throws Error if a file is missing or damaged (see NpyArray), not two-dimensional, not of integers, or of another
  // shape than the other; if S != sequence; if a token or label is outside [0, vocab) (file, row, column, value); if no
  // label is counted; if a mask is neither 0 nor 1 or masks a whole sample; if a token type is outside [0,
  // token_types); for a language model if a padded position has a label; or if the folder has a .npy or .npz file that
  // is not read.
  ArrayDataset(const std::string& folder, int64_t sequence, int64_t vocab, LabelOf label_of = LabelOf::kNextToken,
               int64_t token_types = 2);

  int64_t size() const override { return input_.shape()[0]; }
  Fields read(const std::vector<int64_t>& indices, int64_t epoch) const override;

 private:
  // Opens an array of the samples' shape with values in [0, values). None if the file does not exist.
  std::optional<NpyArray> open_optional(const std::string& folder, const std::string& name, int64_t values,
                                        const char* what, const char* remedy) const;

  NpyArray input_;
  NpyArray labels_;
  LabelOf label_of_;
  std::map<std::string, NpyArray> optional_;  // by name of the field
};

// Throws Error for a .npy file in the folder whose name is not one of `read`, and for any .npz file: their author gave
// them a meaning.
void refuse_other_arrays(const std::string& folder, const std::vector<std::string>& read,
                         const std::string& model_type);

}  // namespace twobp
