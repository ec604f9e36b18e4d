// tokenizer.json lists tokens outside the actual vocabulary as "added_tokens": [{"id": 103, "content": "[MASK]",
// "special": true, ...}]. The vocabulary is "model": {"vocab": {token: id}} or, for Unigram, a list.
#include "twobp/data/text/special_tokens.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <system_error>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/data/text/tokenizer.h"
#include "twobp/files/json_file.h"

namespace twobp {
namespace {

using nlohmann::json;

constexpr int kDepth = 64;
constexpr uint64_t kMostTokenizerBytes = 256 << 20;
constexpr int64_t kMostId = int64_t{1} << 31;

int64_t checked_id(const json& value, const std::string& path) {
  TWOBP_CHECK(value.is_number_integer() && value.get<int64_t>() >= 0 && value.get<int64_t>() < kMostId, path,
              ": not a tokenizer: a token's id is no number from 0 to ", kMostId - 1, ".");
  return value.get<int64_t>();
}

// The value of `key` in tokenizer_config.json: a text, or an object with its content. "" if the key is missing.
std::string configured_name(const std::string& path, const char* key) {
  const std::string beside = (std::filesystem::path(path).parent_path() / "tokenizer_config.json").string();
  std::error_code ignored;
  if (!std::filesystem::exists(beside, ignored)) return "";
  json value = read_json_object(beside, kDepth).value(key, json());
  if (value.is_object()) value = value.value("content", json());
  return value.is_string() ? value.get<std::string>() : "";
}

}  // namespace

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
