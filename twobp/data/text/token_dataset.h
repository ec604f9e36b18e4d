// A source of tokens as training data, cut into samples.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "twobp/data/data.h"
#include "twobp/data/text/token_files.h"

namespace twobp {

// The `input_ids` of sample i are the S tokens from token i * S on, and its `labels` are the S tokens from the
// following token on. A sample may begin in one file and end in the next. An incomplete sample at the end is left out.
class TokenDataset : public Dataset {
 public:
  TokenDataset(std::shared_ptr<const TokenSource> tokens, int64_t sequence);
  // Reads token files: see TokenFiles.
  TokenDataset(std::string name, const std::vector<std::string>& files, std::optional<TokenType> given,
               int64_t sequence, int64_t vocab);

  int64_t size() const override;
  Fields read(const std::vector<int64_t>& indices, int64_t epoch) const override;

  std::string description() const { return tokens_->description(); }

 private:
  std::shared_ptr<const TokenSource> tokens_;
  int64_t sequence_;
};

}  // namespace twobp
