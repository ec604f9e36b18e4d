// Text for masked language models (BERT, arXiv 1810.04805): some tokens are hidden and become the labels.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "twobp/data/data.h"
#include "twobp/data/text/special_tokens.h"

namespace twobp {

// A sample is [CLS], S - 2 tokens of text, [SEP]. A fraction `probability` of the text tokens that are not special is
// chosen (rounded to a whole number, at least one). Of the chosen tokens, 80 % become [MASK], 10 % become a random
// token that is not special, and 10 % stay. `labels` holds the chosen positions' tokens, and -100 elsewhere: a label
// belongs to its own position. The choice depends on (seed, epoch, sample) alone, so it differs between epochs and is
// always the same in evaluation. `input_ids` and `labels` (B, S) int64. There is no padding, so there is no
// attention_mask.
class MaskedDataset : public Dataset {
 public:
  // `text` provides `input_ids` (B, S - 2). Throws Error if the probability is outside (0, 1].
  MaskedDataset(std::shared_ptr<const Dataset> text, SpecialTokens special, double probability, uint64_t seed);

  int64_t size() const override { return text_->size(); }
  Fields read(const std::vector<int64_t>& indices, int64_t epoch) const override;

 private:
  bool is_special(int64_t id) const;
  // `ids` and `labels` have `count` positions of text. On entry `ids` holds the tokens, and `labels` holds -100.
  void hide(int64_t* ids, int64_t* labels, int64_t count, uint64_t seed) const;

  std::shared_ptr<const Dataset> text_;
  SpecialTokens special_;
  double probability_;
  uint64_t seed_;
};

}  // namespace twobp
