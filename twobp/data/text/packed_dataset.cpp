#include "twobp/data/text/packed_dataset.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "twobp/core/check.h"

namespace twobp {

Packing parse_packing(std::string_view name) {
  if (name == "none") return Packing::kNone;
  if (name == "split") return Packing::kSplit;
  if (name == "whole") return Packing::kWhole;
  fail("\"", name, "\" is not a way to pack documents: use none, split or whole.");
}

PackedDataset::PackedDataset(std::shared_ptr<const DocumentTokens> text, int64_t first, int64_t last, Packing packing,
                             int64_t sequence)
    : text_(std::move(text)),
      first_(first),
      last_(last),
      split_(packing == Packing::kSplit),
      packs_(packing != Packing::kNone),
      sequence_(sequence) {
  TWOBP_CHECK(sequence >= 1, "data.sequence is ", sequence, ", but must be at least 1.");
  if (split_) return;
  std::vector<int64_t> lengths;
  int64_t longest = 0;
  for (int64_t document = first; document < last; ++document) {
    lengths.push_back(text_->end(document) - text_->begin(document));
    if (lengths.back() > lengths[static_cast<size_t>(longest)]) longest = document - first;
  }
  if (lengths.empty()) return;
  const int64_t most = lengths[static_cast<size_t>(longest)];
  const auto too_long = std::count_if(lengths.begin(), lengths.end(), [&](int64_t one) { return one > sequence; });
  const std::string others = too_long > 1 ? concat(", as have ", too_long - 1, " others") : "";
  TWOBP_CHECK(most <= sequence, "data.packing is \"", packs_ ? "whole" : "none", "\", but ",
              text_->origin ? text_->origin(first + longest) : concat("document ", first + longest + 1),
              " of data.text has ", most, " tokens, more than data.sequence (", sequence, ")", others,
              ": make data.sequence longer, shorten such documents, or set data.packing to split.");
  std::vector<std::vector<int64_t>> samples;
  if (packs_) {
    samples = best_fit(lengths, sequence);
  } else {
    for (int64_t i = 0; i < static_cast<int64_t>(lengths.size()); ++i) samples.push_back({i});
  }
  for (const std::vector<int64_t>& sample : samples) {
    for (const int64_t document : sample) documents_.push_back(first + document);
    sample_ends_.push_back(static_cast<int64_t>(documents_.size()));
  }
}

int64_t PackedDataset::size() const {
  if (!split_) return static_cast<int64_t>(sample_ends_.size());
  return first_ == last_ ? 0 : (text_->end(last_ - 1) - text_->begin(first_)) / sequence_;
}

std::vector<PackedDataset::Part> PackedDataset::parts_of(int64_t sample) const {
  std::vector<Part> parts;
  if (split_) {
    const int64_t begin = text_->begin(first_) + sample * sequence_;
    const auto first = std::upper_bound(text_->ends.begin(), text_->ends.end(), begin);
    for (auto end = first; parts.empty() || parts.back().end < begin + sequence_; ++end)
      parts.push_back({parts.empty() ? begin : parts.back().end, std::min(*end, begin + sequence_), *end});
    return parts;
  }
  const auto at = static_cast<size_t>(sample);
  for (int64_t i = at == 0 ? 0 : sample_ends_[at - 1]; i < sample_ends_[at]; ++i) {
    const int64_t document = documents_[static_cast<size_t>(i)];
    parts.push_back({text_->begin(document), text_->end(document), text_->end(document)});
  }
  return parts;
}

int64_t PackedDataset::cost(int64_t sample) const {
  if (!packs_) return 0;  // attention reads the padding too
  int64_t pairs = 0;
  for (const Part& part : parts_of(sample)) pairs += (part.end - part.begin) * (part.end - part.begin);
  return pairs;
}

Fields PackedDataset::read(const std::vector<int64_t>& indices, int64_t /*epoch*/) const {
  const auto count = static_cast<int64_t>(indices.size());
  const at::Tensor input = at::zeros({count, sequence_}, at::kLong);                 // (B, S)
  const at::Tensor labels = at::full({count, sequence_}, kIgnoredLabel, at::kLong);  // (B, S)
  const at::Tensor starts = at::arange(sequence_, at::kLong).repeat({count, 1});     // (B, S)
  std::vector<int64_t> ids;
  std::vector<uint8_t> counts;
  for (int64_t b = 0; b < count; ++b) {
    const int64_t index = indices[static_cast<size_t>(b)];
    TWOBP_CHECK(index >= 0 && index < size(), "data.text: no sample ", index, ", there are ", size(), ".");
    int64_t position = 0;
    for (const Part& part : parts_of(index)) {
      const int64_t length = part.end - part.begin;
      const int64_t targets = std::min(part.end + 1, part.document_end) - part.begin - 1;
      ids.resize(static_cast<size_t>(targets + 1));
      text_->tokens->copy(part.begin, targets + 1, ids.data());
      counts.assign(ids.size(), 1);
      if (text_->targets) text_->targets->read(static_cast<size_t>(part.begin), counts.data(), counts.size());
      const int64_t at = b * sequence_ + position;
      std::copy_n(ids.data(), length, input.mutable_data_ptr<int64_t>() + at);
      for (int64_t i = 0; i < targets; ++i) {
        const auto next = static_cast<size_t>(i + 1);
        if (counts[next] != 0) labels.mutable_data_ptr<int64_t>()[at + i] = ids[next];
      }
      std::fill_n(starts.mutable_data_ptr<int64_t>() + at, length, position);
      position += length;
    }
  }
  Fields fields = {{"input_ids", input}, {"labels", labels}};
  if (packs_) fields[kDocumentStarts] = starts;
  return fields;
}

std::vector<std::vector<int64_t>> best_fit(const std::vector<int64_t>& lengths, int64_t capacity) {
  std::vector<int64_t> order(lengths.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  const auto length = [&](int64_t document) { return lengths[static_cast<size_t>(document)]; };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return length(a) > length(b); });
  std::vector<std::vector<int64_t>> samples;
  std::map<int64_t, std::vector<size_t>> by_room;
  for (const int64_t document : order) {
    const auto found = by_room.lower_bound(length(document));
    size_t sample = samples.size();
    int64_t room = capacity;
    if (found == by_room.end()) {
      samples.emplace_back();
    } else {
      room = found->first;
      sample = found->second.back();
      found->second.pop_back();
      if (found->second.empty()) by_room.erase(found);
    }
    samples[sample].push_back(document);
    by_room[room - length(document)].push_back(sample);
  }
  for (auto& sample : samples) std::sort(sample.begin(), sample.end());
  std::sort(samples.begin(), samples.end());
  return samples;
}

}  // namespace twobp
