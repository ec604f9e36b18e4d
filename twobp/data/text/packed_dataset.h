// Documents packed into samples, for models that keep the documents of a sample apart.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "twobp/data/data.h"
#include "twobp/data/text/token_source.h"
#include "twobp/files/input_file.h"
#include "twobp/nn/layers/attention_inputs.h"

namespace twobp {

enum class Packing : uint8_t {
  kNone,   // a sample is a document, and padding
  kSplit,  // documents follow one another, and are cut where a sample ends
  kWhole,  // a sample is several documents that are not cut, chosen by best fit, and padding
};

Packing parse_packing(std::string_view name);  // "none", "split", "whole"; throws Error otherwise

struct DocumentTokens {
  std::shared_ptr<const TokenSource> tokens;
  std::vector<int64_t> ends;                 // [document]: the end of its tokens
  std::shared_ptr<const InputFile> targets;  // one byte for each token: whether it is a target; null: all are
  // Where a document comes from, for messages: "texts.jsonl:17". None: unknown.
  std::function<std::string(int64_t document)> origin{};

  int64_t begin(int64_t document) const { return document == 0 ? 0 : ends[static_cast<size_t>(document - 1)]; }
  int64_t end(int64_t document) const { return ends[static_cast<size_t>(document)]; }
};

// The fields are `input_ids`, `labels` (both as of TokenDataset) and, unless nothing is packed,
// document_starts (attention_inputs.h). No label crosses into another document: that of a document's last token is
// -100, and so are those of tokens that are no targets and of padding, whose id is 0. With kSplit, an
// incomplete sample at the end is left out; a document that goes on in the next sample has a label at the end
// of this one, but begins there anew.
class PackedDataset : public Dataset {
 public:
  // Packs the documents [first, last). Throws Error if one is longer than `sequence` and documents are not
  // cut.
  PackedDataset(std::shared_ptr<const DocumentTokens> text, int64_t first, int64_t last, Packing packing,
                int64_t sequence);

  int64_t size() const override;
  Fields read(const std::vector<int64_t>& indices, int64_t epoch) const override;
  // The pairs of positions within one document, to which attention's time is in proportion.
  int64_t cost(int64_t sample) const override;

 private:
  struct Part {
    int64_t begin = 0;  // of its tokens in the text
    int64_t end = 0;
    int64_t document_end = 0;
  };
  std::vector<Part> parts_of(int64_t sample) const;

  std::shared_ptr<const DocumentTokens> text_;
  int64_t first_;
  int64_t last_;
  bool split_;
  bool packs_;
  int64_t sequence_;
  std::vector<int64_t> documents_;    // not kSplit: of all samples, one after the other
  std::vector<int64_t> sample_ends_;  // not kSplit: the end of each sample's documents
};

// Packing of documents into samples, none of which is cut: best fit, decreasing (H. Ding et al., "Fewer
// Truncations Improve Language Modeling", arXiv 2404.10830).
// The documents of each sample of at most `capacity` tokens. Documents are taken from the longest on; each
// goes to the sample with the least room that it fits into. Within a sample, and by their first document,
// all are in order. Each length must be from 1 to `capacity`.
std::vector<std::vector<int64_t>> best_fit(const std::vector<int64_t>& lengths, int64_t capacity);

}  // namespace twobp
