// Plain text as training data: files as one long row of bytes, each byte a token, cut into sequences.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "twobp/data/data.h"

namespace twobp {

// Sample i has as `input_ids` the S bytes from byte i * S on, and as `labels` the S bytes from the byte
// after: every byte but the first is a target once, and what does not fill a sequence at the end is left out.
class TextDataset : public Dataset {
 public:
  // The files that match the glob (see matching_files), one after the other. Throws Error: nothing matches, a
  // file cannot be read.
  TextDataset(const std::string& pattern, int64_t sequence);

  int64_t size() const override;
  Fields read(const std::vector<int64_t>& indices, int64_t epoch) const override;

  // "3 files that match "*.txt", 1200 bytes in all": for messages.
  std::string description() const;

 private:
  std::string pattern_;
  int64_t sequence_;
  size_t files_ = 0;
  std::vector<uint8_t> bytes_;
};

}  // namespace twobp
