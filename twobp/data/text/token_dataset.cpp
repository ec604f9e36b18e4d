#include "twobp/data/text/token_dataset.h"

#include <algorithm>
#include <utility>

#include "twobp/core/check.h"

namespace twobp {

TokenDataset::TokenDataset(std::shared_ptr<const TokenSource> tokens, int64_t sequence)
    : tokens_(std::move(tokens)), sequence_(sequence) {
  TWOBP_CHECK(sequence >= 1, "data.sequence is ", sequence, ", but must be at least 1.");
}

TokenDataset::TokenDataset(std::string name, const std::vector<std::string>& files, std::optional<TokenType> given,
                           int64_t sequence, int64_t vocab)
    : TokenDataset(std::make_shared<TokenFiles>(std::move(name), files, given, vocab), sequence) {}

int64_t TokenDataset::size() const {
  return (std::max<int64_t>(tokens_->tokens(), 1) - 1) / sequence_;
}

Fields TokenDataset::read(const std::vector<int64_t>& indices, int64_t /*epoch*/) const {
  const auto count = static_cast<int64_t>(indices.size());
  const at::Tensor rows = at::empty({count, sequence_ + 1}, at::kLong);  // (B, S + 1)
  for (int64_t b = 0; b < count; ++b) {
    const int64_t index = indices[static_cast<size_t>(b)];
    TWOBP_CHECK(index >= 0 && index < size(), tokens_->name(), ": no sample ", index, ", there are ", size(), ".");
    tokens_->copy(index * sequence_, sequence_ + 1, rows.data_ptr<int64_t>() + b * (sequence_ + 1));
  }
  return {{"input_ids", rows.narrow(1, 0, sequence_).contiguous()},
          {"labels", rows.narrow(1, 1, sequence_).contiguous()}};
}

}  // namespace twobp
