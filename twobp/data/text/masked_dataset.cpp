#include "twobp/data/text/masked_dataset.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/core/random.h"

namespace twobp {
namespace {

constexpr uint64_t kMaskStream = 0x6d61736b;  // distinguishes these draws from others with the same seed

}  // namespace

MaskedDataset::MaskedDataset(std::shared_ptr<const Dataset> text, SpecialTokens special, double probability,
                             uint64_t seed)
    : text_(std::move(text)), special_(std::move(special)), probability_(probability), seed_(seed) {
  TWOBP_CHECK(probability > 0 && probability <= 1, "data.mask_probability is ", probability,
              ", but must be above 0 and at most 1.");
  TWOBP_CHECK(special_.vocab > static_cast<int64_t>(special_.all.size()),
              "the tokenizer has only special tokens, so none can replace a masked token.");
}

bool MaskedDataset::is_special(int64_t id) const {
  return std::binary_search(special_.all.begin(), special_.all.end(), id);
}

void MaskedDataset::hide(int64_t* ids, int64_t* labels, int64_t count, uint64_t seed) const {
  SplitMix64 random(seed);
  std::vector<int64_t> positions;
  for (int64_t t = 0; t < count; ++t) {
    if (!is_special(ids[t])) positions.push_back(t);
  }
  if (positions.empty()) {  // for example if the tokenizer knows none of them; still a sample
    positions.resize(static_cast<size_t>(count));
    std::iota(positions.begin(), positions.end(), 0);
  }
  const auto all = static_cast<int64_t>(positions.size());
  const int64_t chosen = std::clamp<int64_t>(std::llround(probability_ * static_cast<double>(all)), 1, all);
  for (int64_t i = 0; i < chosen; ++i) {  // the beginning of a Fisher-Yates shuffle
    const auto other = i + static_cast<int64_t>(bounded(random, static_cast<uint64_t>(all - i)));
    std::swap(positions[static_cast<size_t>(i)], positions[static_cast<size_t>(other)]);
    const int64_t t = positions[static_cast<size_t>(i)];
    labels[t] = ids[t];
    const uint64_t fate = bounded(random, 10);
    if (fate < 8) {
      ids[t] = special_.mask;
    } else if (fate == 8) {
      do {
        ids[t] = static_cast<int64_t>(bounded(random, static_cast<uint64_t>(special_.vocab)));
      } while (is_special(ids[t]));
    }
  }
}

Fields MaskedDataset::read(const std::vector<int64_t>& indices, int64_t epoch) const {
  const at::Tensor text = text_->read(indices, epoch).at("input_ids");  // (B, S - 2)
  const int64_t inner = text.size(1);
  at::Tensor input = at::empty({text.size(0), inner + 2}, at::kLong);                 // (B, S)
  at::Tensor labels = at::full({text.size(0), inner + 2}, kIgnoredLabel, at::kLong);  // (B, S)
  const uint64_t epoch_seed = mix_bits(mix_bits(seed_, kMaskStream), static_cast<uint64_t>(epoch));
  for (int64_t b = 0; b < text.size(0); ++b) {
    int64_t* row = input.data_ptr<int64_t>() + b * (inner + 2);
    row[0] = special_.begin;
    std::copy_n(text.const_data_ptr<int64_t>() + b * inner, inner, row + 1);
    row[inner + 1] = special_.end;
    hide(row + 1, labels.data_ptr<int64_t>() + b * (inner + 2) + 1, inner,
         mix_bits(epoch_seed, static_cast<uint64_t>(indices[static_cast<size_t>(b)])));
  }
  return {{"input_ids", std::move(input)}, {"labels", std::move(labels)}};
}

}  // namespace twobp
