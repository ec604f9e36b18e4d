// The keys of the data, and the checks that need only the configuration.
#include "twobp/data/data_config.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "twobp/config/settings.h"
#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/data/array_dataset.h"
#include "twobp/data/text/masked_dataset.h"

namespace twobp {
namespace {

// The keys that name a data source and are set.
std::vector<std::string> sources(const DataConfig& data) {
  const std::vector<std::pair<std::string, const std::string*>> keys = {{"data.text", &data.text},
                                                                        {"data.tokens", &data.tokens},
                                                                        {"data.arrays", &data.arrays},
                                                                        {"data.synthetic", &data.synthetic}};
  std::vector<std::string> given;
  for (const auto& [name, value] : keys) {
    if (!value->empty()) given.push_back(name);
  }
  return given;
}

struct Kind {
  const char* name;       // name of the input
  const char* synthetic;  // value of data.synthetic for this input
  std::vector<std::string> sources;
};

Kind kind_of(const ModelInput& model) {
  switch (model.kind) {
    case InputKind::kTokens:
    case InputKind::kMaskedTokens:
      return {"tokens", "tokens", {"data.text", "data.tokens", "data.arrays"}};
    case InputKind::kImages:
      return {"pictures", "images", {"data.arrays"}};
    case InputKind::kVectors:
      return {"vectors", "vectors", {}};
    case InputKind::kFields:
      if (are_tokens(model.fields) && model.vocab > 0)
        return {"tokens", "tokens", {"data.text", "data.tokens", "data.arrays"}};
      return {"arrays of its fields", "", {"data.arrays"}};
  }
  fail("kind_of: unknown input.");
}

void check_kind(const std::string& source, const DataConfig& data, const ModelInput& model) {
  const Kind kind = kind_of(model);
  const bool synthetic = source == "data.synthetic";
  if (synthetic ? data.synthetic == kind.synthetic
                : std::find(kind.sources.begin(), kind.sources.end(), source) != kind.sources.end()) {
    return;
  }
  std::string instead = join(kind.sources, ", ");
  if (kind.synthetic[0] != '\0')
    instead += concat(instead.empty() ? "" : " or ", "data.synthetic to \"", kind.synthetic, '"');
  fail(source, synthetic ? concat(" is \"", data.synthetic, "\"") : std::string(" is given"), ", but model.type is \"",
       model.type, "\", which reads ", kind.name, ": set ", instead, " instead, or another model.type.");
}

// The source, with its kind if that decides which keys it uses: "data.arrays of pictures".
std::string source_with_kind(const std::string& source, const DataConfig& data, const ModelInput& model) {
  if (source == "data.synthetic") return concat(source, " ", data.synthetic);
  if (source == "data.arrays" && model.kind == InputKind::kFields) return source + " of a captured model";
  if (source == "data.arrays") return source + (model.kind == InputKind::kImages ? " of pictures" : " of tokens");
  return source;
}

// The keys that some sources do not use, and the sources that use them.
struct KeyUse {
  std::string key;
  std::vector<std::string> sources;
  // A further condition, and its text. Null: none.
  bool (*holds)(const DataConfig& data, const ModelInput& model) = nullptr;
  const char* only = "";
};

bool has_tokenizer(const DataConfig& data, const ModelInput& model) {
  return !data.tokenizer.empty() || !model.from.empty();
}

bool keeps_in_cache(const DataConfig& data, const ModelInput& model) {
  return model.kind == InputKind::kFields || (!data.text.empty() && has_tokenizer(data, model));
}

const std::vector<KeyUse>& key_uses() {
  static const std::vector<std::string> pictures = {"data.arrays of pictures"};
  static const std::vector<KeyUse> uses = {
      {"cache",
       {"data.text", "data.tokens", "data.arrays of a captured model", "data.synthetic tokens"},
       keeps_in_cache,
       " with a tokenizer, or for a captured model"},
      {"end_of_text", {"data.text"}, has_tokenizer, " with a tokenizer"},
      {"token_type", {"data.tokens"}},
      {"sequence",
       {"data.text", "data.tokens", "data.arrays of tokens", "data.synthetic tokens", "data.synthetic vectors"}},
      {"mask_probability",
       {"data.text", "data.tokens", "data.synthetic tokens"},
       [](const DataConfig&, const ModelInput& model) { return model.kind == InputKind::kMaskedTokens; },
       " with model.type \"bert\""},
      {"image_size", {"data.arrays of pictures", "data.synthetic images"}},
      {"crop", pictures},
      {"padding", pictures, [](const DataConfig& data, const ModelInput&) { return data.crop == "shift"; },
       " with data.crop \"shift\""},
      {"flip", pictures},
      {"mean", pictures},
      {"std", pictures}};
  return uses;
}

bool uses(const KeyUse& use, const std::string& source, const DataConfig& data, const ModelInput& model) {
  if (use.holds != nullptr && !use.holds(data, model)) return false;
  const std::string exact = source_with_kind(source, data, model);
  return std::find(use.sources.begin(), use.sources.end(), exact) != use.sources.end();
}

// A loaded model has its own vocabulary and often a tokenizer. open_data checks these.
void check_text(const std::string& source, const DataConfig& data, const ModelInput& model) {
  const bool masked = model.kind == InputKind::kMaskedTokens;
  TWOBP_CHECK(data.tokenizer.empty() || !data.text.empty() || (masked && !data.tokens.empty()),
              "data.tokenizer is set, but there is no data.text for it: ", source, " needs none, so remove it.");
  TWOBP_CHECK(!masked || data.tokens.empty() || !data.tokenizer.empty() || !model.from.empty(),
              "data.tokens is given, but model.type \"", model.type,
              "\" needs to know which tokens are special: name their tokenizer.json in data.tokenizer.");
  TWOBP_CHECK(!masked || data.sequence >= 3, "data.sequence is ", data.sequence,
              ", but a sample of a masked language model has at least 3 tokens: the first and the last are special.");
  const int64_t bytes = masked ? kMaskedByteVocab : 256;
  TWOBP_CHECK(data.text.empty() || !data.tokenizer.empty() || !model.from.empty() || model.vocab == bytes,
              "model.vocab is ", model.vocab, ", but data.text is read as bytes, whose vocabulary is ", bytes,
              masked ? " with 4 special ones" : "", ": set model.vocab to ", bytes,
              ", or name a tokenizer.json in data.tokenizer.");
}

}  // namespace

const Section& data_section() {
  static const Section section = make_section<DataConfig>(
      "data",
      {TWOBP_KEY(DataConfig, text, "glob of text files; read as bytes unless there is a tokenizer").path(),
       TWOBP_KEY(DataConfig, tokenizer,
                 "tokenizer.json, or a folder with one, for data.text; \"\": that of model.from, else tokens "
                 "are bytes")
           .path(),
       TWOBP_KEY(DataConfig, cache,
                 "folder for tokenized text and captured models; \"\": $XDG_CACHE_HOME/twobp, or else "
                 "~/.cache/twobp")
           .path(),
       TWOBP_KEY(DataConfig, end_of_text, "the tokenizer's end-of-text token, if it has one, follows each file")
           .free_on_resume(),
       TWOBP_KEY(DataConfig, tokens, "glob of token files: little-endian numbers, also after llm.c's header").path(),
       TWOBP_KEY(DataConfig, token_type,
                 "type of the numbers in data.tokens; \"\": that of llm.c's header, or uint16 without one")
           .one_of({"uint16", "uint32"})
           .free_on_resume(),
       TWOBP_KEY(DataConfig, arrays,
                 "folder with labels.npy and input_ids.npy, or pixel_values.npy for pictures; of a captured "
                 "model: NAME.npy for each of its fields")
           .path(),
       TWOBP_KEY(DataConfig, synthetic, "seeded random input, for benchmarks; vectors is for the mlp model")
           .one_of({"tokens", "images", "vectors"})
           .free_on_resume(),
       TWOBP_KEY(DataConfig, sequence, "length of a sample").in("tokens").from(1, kMaxLength),
       TWOBP_KEY(DataConfig, shuffle, "a new order of the samples each epoch, from train.seed"),
       TWOBP_KEY(DataConfig, held_out,
                 "part of the samples kept for evaluation: of text from the end, of pictures from each class")
           .in("fraction")
           .from_to_below(0, 1),
       TWOBP_KEY(DataConfig, workers, "threads that read batches ahead, at low priority")
           .in("threads")
           .from(1, 1024)
           .free_on_resume()
           .differs_by_process(),
       TWOBP_KEY(DataConfig, mask_probability, "masked language models: fraction of the tokens to hide")
           .in("fraction")
           .above_to(0, 1),
       TWOBP_KEY(DataConfig, image_size, "height and width; 0: those of the arrays, 224 for synthetic pictures")
           .in("pixels")
           .from(0, kMaxCount),
       TWOBP_KEY(DataConfig, crop,
                 "part of a picture used in training: the centre (none), the shifted centre (shift), or a "
                 "random part, rescaled (resized); \"\": none")
           .one_of({"none", "shift", "resized"}),
       TWOBP_KEY(DataConfig, padding, "largest shift of data.crop shift, each way").in("pixels").from(0, kMaxCount),
       TWOBP_KEY(DataConfig, flip, "mirrors pictures left to right with probability 1/2, in training"),
       TWOBP_KEY(DataConfig, mean,
                 "mean that is subtracted from pixels (0 to 1), one for each channel or one for all; []: "
                 "measured; none for floats"),
       TWOBP_KEY(DataConfig, std, "standard deviation by which pixels are divided after that; []: as for data.mean")});
  return section;
}

std::vector<std::string> unused_keys(const DataConfig& data, const ModelInput& model) {
  const std::vector<std::string> given = sources(data);
  std::vector<std::string> unused;
  for (const KeyUse& use : key_uses()) {
    if (given.size() == 1 && !uses(use, given.front(), data, model)) unused.push_back(use.key);
  }
  return unused;
}

void check_data(const DataConfig& data, const ModelInput& model) {
  const std::vector<std::string> given = sources(data);
  TWOBP_CHECK(!given.empty(),
              "no data is given: set data.text (a glob of text files), data.tokens (a glob of token files), "
              "data.arrays (a folder of .npy files), or data.synthetic (tokens, images or vectors).");
  TWOBP_CHECK(given.size() == 1, join(given, " and "), " are given, but data comes from one source: keep one of them.");
  check_kind(given.front(), data, model);
  check_text(given.front(), data, model);
}

void check_used_keys(const DataConfig& data, const ModelInput& model) {
  DataConfig copy = data;  // keys return pointers for writing
  DataConfig defaults;
  const std::vector<std::string> unused = unused_keys(data, model);
  for (const Key& key : data_section().keys) {
    if (std::find(unused.begin(), unused.end(), key.name) == unused.end()) continue;
    if (value_to_json(key, &copy) == value_to_json(key, &defaults)) continue;
    const KeyUse& use =
        *std::find_if(key_uses().begin(), key_uses().end(), [&](const KeyUse& one) { return one.key == key.name; });
    fail("data.", key.name, " is set, but ", source_with_kind(sources(data).front(), data, model),
         " does not use it for model.type \"", model.type, "\": it is for ", join(use.sources, ", "), use.only,
         ". Remove data.", key.name, ".");
  }
}

std::string_view item_name(InputKind kind) {
  switch (kind) {
    case InputKind::kImages:
      return "images";
    case InputKind::kVectors:
      return "vectors";
    case InputKind::kFields:
      return "items";
    default:
      return "tokens";
  }
}

}  // namespace twobp
