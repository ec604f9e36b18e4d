// Reads the files into one buffer, and returns windows of it.
#include "twobp/data/text/text_dataset.h"

#include <algorithm>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/data/text/text_file.h"
#include "twobp/files/glob.h"
#include "twobp/files/input_file.h"

namespace twobp {

TextDataset::TextDataset(const std::string& pattern, int64_t sequence) : pattern_(pattern), sequence_(sequence) {
  TWOBP_CHECK(sequence >= 1, "data.sequence is ", sequence, ", but must be at least 1.");
  const std::vector<std::string> paths = matching_files(pattern, "data.text", ".txt");
  files_ = paths.size();
  for (const auto& path : paths) {
    const InputFile file(path);
    check_text(file);
    const size_t before = bytes_.size();
    bytes_.resize(before + file.size());
    file.read(0, bytes_.data() + before, file.size());
  }
}

int64_t TextDataset::size() const {
  return bytes_.empty() ? 0 : (static_cast<int64_t>(bytes_.size()) - 1) / sequence_;
}

Fields TextDataset::read(const std::vector<int64_t>& indices, int64_t /*epoch*/) const {
  const auto count = static_cast<int64_t>(indices.size());
  at::Tensor input = at::empty({count, sequence_}, at::kLong);   // (B, S)
  at::Tensor labels = at::empty({count, sequence_}, at::kLong);  // (B, S)
  for (int64_t b = 0; b < count; ++b) {
    const int64_t index = indices[static_cast<size_t>(b)];
    TWOBP_CHECK(index >= 0 && index < size(), "text data: no sample ", index, ", there are ", size(), ".");
    const uint8_t* begin = bytes_.data() + index * sequence_;
    std::copy_n(begin, sequence_, input.data_ptr<int64_t>() + b * sequence_);
    std::copy_n(begin + 1, sequence_, labels.data_ptr<int64_t>() + b * sequence_);
  }
  return {{"input_ids", std::move(input)}, {"labels", std::move(labels)}};
}

std::string TextDataset::description() const {
  return concat(files_, files_ == 1 ? " file that matches \"" : " files that match \"", pattern_, "\", ", bytes_.size(),
                " bytes", files_ == 1 ? "" : " in all");
}

}  // namespace twobp
