// Text for masked language models (BERT, arXiv 1810.04805): some tokens are hidden, and are the labels.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "twobp/data/data.h"
#include "twobp/data/text/special_tokens.h"

namespace twobp {

// A sample is [CLS], S - 2 tokens of text, [SEP]. Of the tokens of text that are not special themselves
// `probability` is chosen (rounded to a whole number, at least one): 80 % of the chosen become [MASK], 10 % a
// random token that is not special, 10 % stay. `labels` are the chosen positions' tokens, -100 elsewhere:
// they belong to their own position. Which are chosen depends on (seed, epoch, sample) alone: each epoch
// others, in an evaluation always the same. `input_ids` and `labels` (B, S) int64; there is no padding, so no
// attention_mask.
class MaskedDataset : public Dataset {
 public:
  // `text` gives `input_ids` (B, S - 2). Throws Error: a probability outside (0, 1].
  MaskedDataset(std::shared_ptr<const Dataset> text, SpecialTokens special, double probability,
                uint64_t seed);

  int64_t size() const override { return text_->size(); }
  Fields read(const std::vector<int64_t>& indices, int64_t epoch) const override;

 private:
  bool is_special(int64_t id) const;
  // `ids` and `labels`: `count` positions of text; the first hold the tokens, the others -100.
  void hide(int64_t* ids, int64_t* labels, int64_t count, uint64_t seed) const;

  std::shared_ptr<const Dataset> text_;
  SpecialTokens special_;
  double probability_;
  uint64_t seed_;
};

}  // namespace twobp
