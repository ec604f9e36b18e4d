#include "twobp/data/text/masked_dataset.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <numeric>
#include <system_error>
#include <utility>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/core/random.h"
#include "twobp/data/text/tokenizer.h"
#include "twobp/files/input_file.h"

namespace twobp {
namespace {

constexpr uint64_t kMaskStream = 0x6d61736b;  // distinguishes these draws from others with the same seed

using nlohmann::json;

constexpr int kDepth = 64;
constexpr uint64_t kMostTokenizerBytes = 256 << 20;
constexpr int64_t kMostId = int64_t{1} << 31;

int64_t checked_id(const json& value, const std::string& path) {
  TWOBP_CHECK(value.is_number_integer() && value.get<int64_t>() >= 0 && value.get<int64_t>() < kMostId, path,
              ": not a tokenizer: a token's id is no number from 0 to ", kMostId - 1, ".");
  return value.get<int64_t>();
}

// The value of `key` in tokenizer_config.json: a text, or an object with its content. "" if the key is
// missing.
std::string configured_name(const std::string& path, const char* key) {
  const std::string beside = (std::filesystem::path(path).parent_path() / "tokenizer_config.json").string();
  std::error_code ignored;
  if (!std::filesystem::exists(beside, ignored)) return "";
  json value = read_json_object(beside, kDepth).value(key, json());
  if (value.is_object()) value = value.value("content", json());
  return value.is_string() ? value.get<std::string>() : "";
}

}  // namespace

MaskedDataset::MaskedDataset(std::shared_ptr<const Dataset> text, SpecialTokens special, double probability,
                             uint64_t seed)
    : text_(std::move(text)), special_(std::move(special)), probability_(probability), seed_(seed) {
  TWOBP_CHECK(probability > 0 && probability <= 1, "data.mask_probability is ", probability,
              ", but must be above 0 and at most 1.");
  TWOBP_CHECK(special_.vocab > static_cast<int64_t>(special_.all.size()),
              "the tokenizer has only special tokens, so none can replace a masked token.");
}

bool MaskedDataset::is_special(int64_t id) const {
  return std::binary_search(special_.all.begin(), special_.all.end(), id);
}

void MaskedDataset::hide(int64_t* ids, int64_t* labels, int64_t count, uint64_t seed) const {
  SplitMix64 random(seed);
  std::vector<int64_t> positions;
  for (int64_t t = 0; t < count; ++t) {
    if (!is_special(ids[t])) positions.push_back(t);
  }
  if (positions.empty()) {  // for example if the tokenizer knows none of them; still a sample
    positions.resize(static_cast<size_t>(count));
    std::iota(positions.begin(), positions.end(), 0);
  }
  const auto all = static_cast<int64_t>(positions.size());
  const int64_t chosen = std::clamp<int64_t>(std::llround(probability_ * static_cast<double>(all)), 1, all);
  for (int64_t i = 0; i < chosen; ++i) {  // the beginning of a Fisher-Yates shuffle
    const auto other = i + static_cast<int64_t>(bounded(random, static_cast<uint64_t>(all - i)));
    std::swap(positions[static_cast<size_t>(i)], positions[static_cast<size_t>(other)]);
    const int64_t t = positions[static_cast<size_t>(i)];
    labels[t] = ids[t];
    const uint64_t fate = bounded(random, 10);
    if (fate < 8) {
      ids[t] = special_.mask;
    } else if (fate == 8) {
      do {
        ids[t] = static_cast<int64_t>(bounded(random, static_cast<uint64_t>(special_.vocab)));
      } while (is_special(ids[t]));
    }
  }
}

Fields MaskedDataset::read(const std::vector<int64_t>& indices, int64_t epoch) const {
  const at::Tensor text = text_->read(indices, epoch).at("input_ids");  // (B, S - 2)
  const int64_t inner = text.size(1);
  at::Tensor input = at::empty({text.size(0), inner + 2}, at::kLong);                 // (B, S)
  at::Tensor labels = at::full({text.size(0), inner + 2}, kIgnoredLabel, at::kLong);  // (B, S)
  const uint64_t epoch_seed = mix_bits(mix_bits(seed_, kMaskStream), static_cast<uint64_t>(epoch));
  for (int64_t b = 0; b < text.size(0); ++b) {
    int64_t* row = input.data_ptr<int64_t>() + b * (inner + 2);
    row[0] = special_.begin;
    std::copy_n(text.const_data_ptr<int64_t>() + b * inner, inner, row + 1);
    row[inner + 1] = special_.end;
    hide(row + 1, labels.data_ptr<int64_t>() + b * (inner + 2) + 1, inner,
         mix_bits(epoch_seed, static_cast<uint64_t>(indices[static_cast<size_t>(b)])));
  }
  return {{"input_ids", std::move(input)}, {"labels", std::move(labels)}};
}

SpecialTokens read_special_tokens(const std::string& tokenizer) {
  const std::string path = tokenizer_file(tokenizer);
  const json root = read_json_object(path, kDepth, kMostTokenizerBytes);
  const json model = root.value("model", json());
  TWOBP_CHECK(model.is_object() && model.contains("vocab") && model["vocab"].is_structured(), path,
              ": not a tokenizer: it has no model.vocab.");
  const json& vocab = model["vocab"];
  SpecialTokens out;
  if (vocab.is_array()) {
    out.vocab = static_cast<int64_t>(vocab.size());
  } else {
    for (const json& id : vocab) out.vocab = std::max(out.vocab, checked_id(id, path) + 1);
  }
  std::map<std::string, int64_t> added;
  const json tokens = root.value("added_tokens", json::array());
  TWOBP_CHECK(tokens.is_array(), path, ": not a tokenizer: its added_tokens are no list.");
  for (const json& token : tokens) {
    TWOBP_CHECK(token.is_object() && token.contains("id") && token.contains("content") && token["content"].is_string(),
                path, ": not a tokenizer: an added token has no id or content.");
    const int64_t id = checked_id(token["id"], path);
    out.vocab = std::max(out.vocab, id + 1);
    added[token["content"].get<std::string>()] = id;
    const json special = token.value("special", json(false));
    if (special.is_boolean() && special.get<bool>()) out.all.push_back(id);
  }
  const auto find = [&](const char* key, const char* usual, const char* other) {
    const std::string configured = configured_name(path, key);
    for (const std::string& name : {configured, std::string(usual), std::string(other)}) {
      if (name.empty()) continue;
      const auto found = added.find(name);
      if (found != added.end()) return found->second;
      if (vocab.is_object() && vocab.contains(name)) return checked_id(vocab[name], path);
    }
    fail(path, ": the tokenizer has no ", key,
         configured.empty() ? concat(" (", usual, " or ", other, ")") : concat(" (", configured, ")"),
         ", which a masked language model needs: name the tokenizer of such a model in data.tokenizer.");
  };
  out.begin = find("cls_token", "[CLS]", "<s>");
  out.end = find("sep_token", "[SEP]", "</s>");
  out.mask = find("mask_token", "[MASK]", "<mask>");
  out.all.insert(out.all.end(), {out.begin, out.end, out.mask});
  std::sort(out.all.begin(), out.all.end());
  out.all.erase(std::unique(out.all.begin(), out.all.end()), out.all.end());
  return out;
}

}  // namespace twobp
