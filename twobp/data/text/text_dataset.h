// Plain text as training data. The files form one long sequence of bytes, each byte is a token, and the sequence is cut
// into samples.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "twobp/data/data.h"

namespace twobp {

// The `input_ids` of sample i are the S bytes from byte i * S on, and its `labels` are the S bytes from the following
// byte on. So every byte but the first is a target once. An incomplete sample at the end is left out.
class TextDataset : public Dataset {
 public:
  // Reads the files that match the glob (see matching_files), one after the other. Throws Error if nothing matches or a
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
