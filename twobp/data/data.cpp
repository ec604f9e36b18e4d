// Opens the configured data, keeps a part of it for evaluation, and cuts samples into batches.
#include "twobp/data/data.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <system_error>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/core/random.h"
#include "twobp/core/text.h"
#include "twobp/data/array_dataset.h"
#include "twobp/data/pixel_dataset.h"
#include "twobp/data/synthetic_dataset.h"
#include "twobp/data/text/masked_dataset.h"
#include "twobp/data/text/plain_text.h"
#include "twobp/data/text/token_cache.h"
#include "twobp/data/text/token_source.h"
#include "twobp/data/text/tokenizer.h"
#include "twobp/files/paths.h"

namespace twobp {
namespace {

// The samples [begin, begin + size) of another dataset.
class Range : public Dataset {
 public:
  Range(std::shared_ptr<const Dataset> whole, int64_t begin, int64_t size)
      : whole_(std::move(whole)), begin_(begin), size_(size) {}

  int64_t size() const override { return size_; }

  Fields read(const std::vector<int64_t>& indices, int64_t epoch) const override {
    std::vector<int64_t> shifted;
    shifted.reserve(indices.size());
    for (const int64_t index : indices) {
      TWOBP_CHECK(index >= 0 && index < size_, "data: no sample ", index, ", there are ", size_, ".");
      shifted.push_back(begin_ + index);
    }
    return whole_->read(shifted, epoch);
  }
  int64_t cost(int64_t sample) const override { return whole_->cost(begin_ + sample); }

 private:
  std::shared_ptr<const Dataset> whole_;
  int64_t begin_;
  int64_t size_;
};

// Holds out the last `fraction` of the samples: at least one, and not all.
DataSplit hold_out(std::shared_ptr<Dataset> whole, double fraction) {
  if (fraction == 0) return {std::move(whole), nullptr};
  const int64_t size = whole->size();
  TWOBP_CHECK(size >= 2, "data: only ", size, " sample, of which data.held_out (", fraction,
              ") would leave none for training: set data.held_out to 0, or give more data.");
  const auto wanted = std::llround(fraction * static_cast<double>(size));
  const int64_t held_out = std::clamp<int64_t>(wanted, 1, size - 1);
  return {std::make_shared<Range>(whole, 0, size - held_out),
          std::make_shared<Range>(whole, size - held_out, held_out)};
}

// The shape of the samples that text is cut into. A masked language model adds two tokens of its own.
struct TextShape {
  int64_t sequence;  // tokens of text
  int64_t bytes;     // size of the vocabulary if text is read as bytes
};

TextShape text_shape(const DataConfig& data, bool masked) {
  return masked ? TextShape{data.sequence - 2, kMaskedByteVocab} : TextShape{data.sequence, 256};
}

// Checks that there is enough for one training sample, and for a second one if any are held out. `unit`:
// "bytes", "tokens".
template <typename Text>
void check_enough(const Text& text, const DataConfig& data, const TextShape& shape, const char* key, const char* unit) {
  const int64_t samples = data.held_out > 0 ? 2 : 1;
  TWOBP_CHECK(text.size() >= samples, key, ": ", text.description(), ": too little text, ",
              samples * shape.sequence + 1, " ", unit, " are needed for ",
              samples == 1 ? "one sequence" : "one sequence to train on and one to hold out",
              ": give more text, or make data.sequence (", data.sequence, ") shorter",
              samples == 1 ? "." : ", or set data.held_out to 0.");
}

// For messages.
std::string origin_of(const std::vector<std::string>& files, const DataConfig& data) {
  return files.size() == 1 ? files[0] : concat(files.size(), " files (", data.text, ")");
}

void check_byte_vocab(const ModelInput& model, int64_t bytes) {
  TWOBP_CHECK(model.vocab == bytes, "model.vocab is ", model.vocab, ", but ",
              model.from.empty() ? "" : concat("there is no tokenizer.json in ", model.from, ", and so "),
              "data.text is read as bytes, whose vocabulary is ", bytes,
              ": name the model's tokenizer in data.tokenizer.");
}

std::shared_ptr<Dataset> open_bytes(const DataConfig& data, const ModelInput& model, const TextShape& shape) {
  check_byte_vocab(model, shape.bytes);
  const std::vector<std::string> files = matching_files(data.text, "data.text", ".txt");
  std::string bytes;
  for (const std::string& path : files) {
    const InputFile file(path);
    check_text(file);
    const size_t before = bytes.size();
    bytes.resize(before + file.size());
    file.read(0, bytes.data() + before, file.size());
  }
  auto text = std::make_shared<TokenDataset>(std::make_shared<ByteSource>(std::move(bytes), origin_of(files, data)),
                                             shape.sequence);
  check_enough(*text, data, shape, "data.text", "bytes");
  return text;
}

std::shared_ptr<Dataset> open_tokenized(const DataConfig& data, const ModelInput& model, const std::string& tokenizer,
                                        const TextShape& shape) {
  const TokenizedText text = tokenize_text(matching_files(data.text, "data.text", ".txt"), tokenizer, data.cache,
                                           model.vocab, data.end_of_text);
  auto tokens = std::make_shared<TokenDataset>("data.text", text.files, text.type, shape.sequence, model.vocab);
  check_enough(*tokens, data, shape, "data.text", "tokens");
  return tokens;
}

std::shared_ptr<Dataset> open_tokens(const DataConfig& data, const ModelInput& model, const TextShape& shape) {
  std::optional<TokenType> type;
  if (!data.token_type.empty()) type = parse_token_type(data.token_type);
  auto tokens = std::make_shared<TokenDataset>("data.tokens", matching_files(data.tokens, "data.tokens", ".bin"), type,
                                               shape.sequence, model.vocab);
  check_enough(*tokens, data, shape, "data.tokens", "tokens");
  return tokens;
}

std::shared_ptr<Dataset> open_text(const DataConfig& data, const ModelInput& model, const TextShape& shape,
                                   uint64_t seed) {
  if (!data.text.empty()) {
    const std::string tokenizer = tokenizer_of(data, model);
    return tokenizer.empty() ? open_bytes(data, model, shape) : open_tokenized(data, model, tokenizer, shape);
  }
  if (!data.tokens.empty()) return open_tokens(data, model, shape);
  return synthetic_tokens(kSyntheticSamples, shape.sequence, model.vocab, seed);
}

// The special tokens of a vocabulary without a tokenizer (bytes, or random numbers): its last four.
SpecialTokens last_tokens(int64_t vocab) {
  TWOBP_CHECK(vocab > 4, "model.vocab is ", vocab, ", but a masked language model has four special tokens and others.");
  return {vocab - 4, vocab - 3, vocab - 2, {vocab - 4, vocab - 3, vocab - 2, vocab - 1}, vocab};
}

SpecialTokens special_tokens_of(const DataConfig& data, const ModelInput& model) {
  const std::string tokenizer = tokenizer_of(data, model);
  if (!data.synthetic.empty() || (tokenizer.empty() && !data.text.empty())) return last_tokens(model.vocab);
  TWOBP_CHECK(!tokenizer.empty(), "there is no tokenizer.json in ", model.from,
              ", which says which tokens are special: name one in data.tokenizer.");
  const SpecialTokens special = read_special_tokens(tokenizer);
  check_vocab(tokenizer, special.vocab, model.vocab);
  return special;
}

std::shared_ptr<Dataset> open_masked(const DataConfig& data, const ModelInput& model, uint64_t seed) {
  if (!data.arrays.empty()) {
    return std::make_shared<ArrayDataset>(data.arrays, data.sequence, model.vocab, LabelOf::kSameToken,
                                          model.token_types);
  }
  SpecialTokens special = special_tokens_of(data, model);
  auto text = open_text(data, model, text_shape(data, /*masked=*/true), seed);
  return std::make_shared<MaskedDataset>(std::move(text), std::move(special), data.mask_probability, seed);
}

std::shared_ptr<Dataset> open_next_token(const DataConfig& data, const ModelInput& model, uint64_t seed) {
  if (!data.arrays.empty()) {
    return std::make_shared<ArrayDataset>(data.arrays, data.sequence, model.vocab, LabelOf::kNextToken, 0,
                                          model.documents);
  }
  return open_text(data, model, text_shape(data, /*masked=*/false), seed);
}

DataSplit open_fields(const DataConfig& data, const ModelInput& model, uint64_t seed) {
  if (!data.arrays.empty()) return hold_out(std::make_shared<FieldDataset>(data.arrays, model.fields), data.held_out);
  DataSplit split = hold_out(open_next_token(data, model, seed), data.held_out);
  for (auto* part : {&split.train, &split.held_out}) {
    if (*part) *part = std::make_shared<UnshiftedLabels>(*part);
  }
  return split;
}

// Leaves out the samples that do not fill a micro-batch, because a captured program is for one size.
std::shared_ptr<Dataset> in_whole_micro_batches(std::shared_ptr<Dataset> samples, int64_t micro_batch,
                                                const char* part) {
  if (!samples) return samples;
  const int64_t size = samples->size();
  TWOBP_CHECK(size >= micro_batch, "data: there are ", size, " samples ", part, ", fewer than the ", micro_batch,
              " of a micro-batch of the captured model: give more data.");
  return std::make_shared<Range>(std::move(samples), 0, size - size % micro_batch);
}

DataSplit in_whole_micro_batches(const DataSplit& split, const ModelInput& model) {
  const int64_t micro_batch = model.fields.front().sizes.front();
  return {in_whole_micro_batches(split.train, micro_batch, "to train on"),
          in_whole_micro_batches(split.held_out, micro_batch, "held out")};
}

int64_t counted_targets(const Fields& fields, int64_t samples) {
  const auto found = fields.find("labels");
  if (found == fields.end()) return samples;
  const auto* labels = found->second.data_ptr<int64_t>();
  return found->second.numel() - std::count(labels, labels + found->second.numel(), kIgnoredLabel);
}

int64_t token_count(const Fields& fields, int64_t samples) {
  const auto found = fields.find("input_ids");
  return found == fields.end() ? samples : found->second.numel();
}

}  // namespace

DataSplit open_data(const DataConfig& data, const ModelInput& model, uint64_t seed) {
  check_data(data, model);
  switch (model.kind) {
    case InputKind::kTokens:
      return hold_out(open_next_token(data, model, seed), data.held_out);
    case InputKind::kMaskedTokens:
      return hold_out(open_masked(data, model, seed), data.held_out);
    case InputKind::kImages:
      return open_images(data, model, seed);
    case InputKind::kFields:
      return in_whole_micro_batches(open_fields(data, model, seed), model);
    case InputKind::kVectors:
      return hold_out(synthetic_vectors(kSyntheticSamples, data.sequence, model.width, seed), data.held_out);
  }
  fail("open_data: unknown input of model type ", model.type, ".");
}

std::string tokenizer_of(const DataConfig& data, const ModelInput& model) {
  if (!data.tokenizer.empty() || model.from.empty()) return data.tokenizer;
  const std::filesystem::path file = std::filesystem::path(model.from) / "tokenizer.json";
  std::error_code ignored;
  return std::filesystem::exists(file, ignored) ? file.string() : "";
}

std::vector<int64_t> epoch_order(int64_t size, bool shuffle, uint64_t seed, int64_t epoch) {
  std::vector<int64_t> order(static_cast<size_t>(size));
  std::iota(order.begin(), order.end(), 0);
  if (!shuffle) return order;
  // Our own Fisher-Yates shuffle, because the result of std::shuffle for an engine differs between libraries.
  std::mt19937_64 engine(mix_bits(seed, static_cast<uint64_t>(epoch)));
  for (size_t left = order.size(); left > 1; --left) std::swap(order[left - 1], order[bounded(engine, left)]);
  return order;
}

Batch read_batch(const Dataset& dataset, const std::vector<int64_t>& indices, int64_t epoch, int64_t micro_batch_size) {
  TWOBP_CHECK(micro_batch_size >= 1, "read_batch: micro-batches of ", micro_batch_size, " samples.");
  std::vector<Fields> micro_batches;
  for (auto begin = indices.begin(); begin != indices.end();) {
    const auto end = begin + std::min<int64_t>(micro_batch_size, indices.end() - begin);
    micro_batches.push_back(dataset.read({begin, end}, epoch));
    begin = end;
  }
  return make_batch(std::move(micro_batches));
}

Batch make_batch(std::vector<Fields> micro_batches, const TargetCount& count_targets) {
  Batch batch;
  batch.micro_batches = std::move(micro_batches);
  for (const Fields& fields : batch.micro_batches) {
    const auto first = std::find_if(fields.begin(), fields.end(), [](const auto& one) { return one.second.dim() > 0; });
    const int64_t samples = first == fields.end() ? 0 : first->second.size(0);
    batch.targets += count_targets ? count_targets(fields) : counted_targets(fields, samples);
    batch.tokens += token_count(fields, samples);
  }
  return batch;
}

}  // namespace twobp
