// Text for masked language models (BERT, arXiv 1810.04805): some tokens are hidden and become the labels.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "twobp/data/data.h"

namespace twobp {

// The special tokens of a tokenizer.json, by their roles in a masked language model.
struct SpecialTokens {
  int64_t begin = 0;         // [CLS]
  int64_t end = 0;           // [SEP]
  int64_t mask = 0;          // [MASK]
  std::vector<int64_t> all;  // sorted: the above, [PAD], [UNK] and all other special tokens
  int64_t vocab = 0;         // the largest id of the tokenizer plus 1
};

// Reads a tokenizer.json (or the one in that folder), without Python. The names are those of cls_token,
// sep_token and mask_token in the tokenizer_config.json next to it. Otherwise they are [CLS], [SEP], [MASK]
// or <s>, </s>, <mask>. Throws Error if the file does not exist or is not a tokenizer, or a token is missing
// (it is named; the tokenizer is of another model).
SpecialTokens read_special_tokens(const std::string& tokenizer);

// For text that is read as bytes. Ids 256 to 259 are begin, end, mask and padding.
inline constexpr int64_t kMaskedByteVocab = 260;

// A sample is [CLS], S - 2 tokens of text, [SEP]. A fraction `probability` of the text tokens that are not
// special is chosen (rounded to a whole number, at least one). Of the chosen tokens, 80 % become [MASK], 10 %
// become a random token that is not special, and 10 % stay. `labels` holds the chosen positions' tokens, and
// -100 elsewhere: a label belongs to its own position. The choice depends on (seed, epoch, sample) alone, so
// it differs between epochs and is always the same in evaluation. `input_ids` and `labels` (B, S) int64.
// There is no padding, so there is no attention_mask.
class MaskedDataset : public Dataset {
 public:
  // `text` provides `input_ids` (B, S - 2). Throws Error if the probability is outside (0, 1].
  MaskedDataset(std::shared_ptr<const Dataset> text, SpecialTokens special, double probability, uint64_t seed);

  int64_t size() const override { return text_->size(); }
  Fields read(const std::vector<int64_t>& indices, int64_t epoch) const override;

 private:
  bool is_special(int64_t id) const;
  // `ids` and `labels` have `count` positions of text. On entry `ids` holds the tokens, and `labels` holds
  // -100.
  void hide(int64_t* ids, int64_t* labels, int64_t count, uint64_t seed) const;

  std::shared_ptr<const Dataset> text_;
  SpecialTokens special_;
  double probability_;
  uint64_t seed_;
};

}  // namespace twobp
