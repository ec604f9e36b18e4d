// Tokenized training data: a folder of NumPy arrays, memory-mapped.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "twobp/train/data.h"
#include "twobp/train/npy.h"

namespace twobp {

// `input_ids.npy` (N, S) and `labels.npy` (N, S), of any integer type. Labels as in `transformers`: label t
// belongs to token t itself and -100 is not counted. The `labels` field is shifted: position t predicts label
// t + 1, the last position nothing.
class ArrayDataset : public Dataset {
 public:
  // Throws Error: a file is missing or damaged (see NpyArray), not two-dimensional, not of integers, of
  // another shape than the other, S != sequence, a token or label outside [0, vocab) (file, row, column,
  // value), nothing counted.
  ArrayDataset(const std::string& folder, int64_t sequence, int64_t vocab);

  int64_t size() const override { return input_.shape()[0]; }
  Fields read(const std::vector<int64_t>& indices) const override;

 private:
  NpyArray input_;
  NpyArray labels_;
};

}  // namespace twobp
