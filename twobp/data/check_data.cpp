// Which data a model can read, as far as the configuration alone tells.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/data/data.h"
#include "twobp/data/text/special_tokens.h"
#include "twobp/models/architecture.h"

namespace twobp {
namespace {

// The keys that say where data comes from, of those that are set.
std::vector<std::string> sources(const DataConfig& data) {
  const std::vector<std::pair<std::string, const std::string*>> keys = {
      {"data.text", &data.text},          {"data.tokens", &data.tokens}, {"data.arrays", &data.arrays},
      {"data.images", &data.images},      {"data.idx", &data.idx},       {"data.cifar", &data.cifar},
      {"data.synthetic", &data.synthetic}};
  std::vector<std::string> given;
  for (const auto& [name, value] : keys) {
    if (!value->empty()) given.push_back(name);
  }
  return given;
}

struct Kind {
  const char* name;       // of what is read
  const char* synthetic;  // the value of data.synthetic that gives it
  std::vector<std::string> sources;
};

Kind kind_of(ModelInput input) {
  switch (input) {
    case ModelInput::kTokens:
    case ModelInput::kMaskedTokens:
      return {"tokens", "tokens", {"data.text", "data.tokens", "data.arrays"}};
    case ModelInput::kImages:
      return {"pictures", "images", {"data.images", "data.idx", "data.cifar", "data.arrays"}};
    case ModelInput::kVectors:
      return {"vectors", "vectors", {}};
  }
  fail("kind_of: unknown input.");
}

void check_kind(const std::string& source, const DataConfig& data, const ModelConfig& model) {
  const Kind kind = kind_of(architecture(model.type).input);
  const bool synthetic = source == "data.synthetic";
  if (synthetic ? data.synthetic == kind.synthetic
                : std::find(kind.sources.begin(), kind.sources.end(), source) != kind.sources.end()) {
    return;
  }
  const std::string instead = join(kind.sources, ", ");
  fail(source, synthetic ? concat(" is \"", data.synthetic, "\"") : std::string(" is given"),
       ", but model.type is \"", model.type, "\", which reads ", kind.name, ": set ", instead,
       instead.empty() ? "" : " or ", "data.synthetic to \"", kind.synthetic,
       "\" instead, or another model.type.");
}

// A model that is loaded brings its own vocabulary, and often a tokenizer: open_data knows more.
void check_text(const std::string& source, const DataConfig& data, const ModelConfig& model) {
  const bool masked = architecture(model.type).input == ModelInput::kMaskedTokens;
  TWOBP_CHECK(data.tokenizer.empty() || !data.text.empty() || (masked && !data.tokens.empty()),
              "data.tokenizer is set, but there is no data.text for it: ", source,
              " needs none, so remove it.");
  TWOBP_CHECK(!masked || data.tokens.empty() || !data.tokenizer.empty() || !model.from.empty(),
              "data.tokens is given, but model.type \"", model.type,
              "\" needs to know which tokens are special: name their tokenizer.json in data.tokenizer.");
  TWOBP_CHECK(
      !masked || data.sequence >= 3, "data.sequence is ", data.sequence,
      ", but a sample of a masked language model has at least 3 tokens: the first and the last are special.");
  const int64_t bytes = masked ? kMaskedByteVocab : 256;
  TWOBP_CHECK(data.text.empty() || !data.tokenizer.empty() || !model.from.empty() || model.vocab == bytes,
              "model.vocab is ", model.vocab, ", but data.text is read as bytes, whose vocabulary is ", bytes,
              masked ? " with 4 special ones" : "", ": set model.vocab to ", bytes,
              ", or name a tokenizer.json in data.tokenizer.");
}

}  // namespace

void check_data(const DataConfig& data, const ModelConfig& model) {
  const std::vector<std::string> given = sources(data);
  TWOBP_CHECK(
      !given.empty(),
      "no data is given: set data.text (a glob of text files), data.tokens (a glob of token files), "
      "data.arrays "
      "(a folder of .npy files), data.images (a folder of folders of pictures), data.idx, data.cifar, or "
      "data.synthetic (tokens, images or vectors).");
  TWOBP_CHECK(given.size() == 1, join(given, " and "),
              " are given, but data comes from one source: keep one of them.");
  check_kind(given.front(), data, model);
  check_text(given.front(), data, model);
}

}  // namespace twobp
