// The data of a captured model: an array for each of its fields, or text that it predicts itself.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "twobp/data/data.h"
#include "twobp/files/npy.h"

namespace twobp {

// Reads NAME.npy for each field, of shape (samples, the field's other sizes). Numbers are converted to the field's
// dtype: integers to any, floating-point numbers to floating-point ones.
class FieldDataset : public Dataset {
 public:
  // Throws Error if a file is missing or damaged (see NpyArray), or of another shape or kind of number than the field;
  // if the arrays differ in their samples; if the folder has an array that is no field; or if a field has no dimension
  // for samples.
  FieldDataset(const std::string& folder, const std::vector<FieldInput>& fields);

  int64_t size() const override { return arrays_.front().second.shape()[0]; }
  Fields read(const std::vector<int64_t>& indices, int64_t epoch) const override;

 private:
  std::vector<std::pair<FieldInput, NpyArray>> arrays_;
};

// The samples of a language model whose loss shifts the labels itself: labels[b, t] is the token at position t, or -100
// where it is not counted.
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

}  // namespace twobp
