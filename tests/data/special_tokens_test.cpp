// Tests the special tokens of a tokenizer.json, and damaged files.
#include <random>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/train/helpers.h"
#include "twobp/data/text/masked_dataset.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;
using test::expect_error;
using test::TempFolder;
using Ids = std::vector<int64_t>;

class Special : public testing::Test {
 protected:
  static json added(int64_t id, const std::string& content, bool special = true) {
    return {{"id", id}, {"content", content}, {"special", special}};
  }
  static json bert() {
    return {{"model",
             {{"type", "WordPiece"}, {"vocab", {{"[PAD]", 0}, {"[CLS]", 2}, {"[SEP]", 3}, {"[MASK]", 4}, {"a", 7}}}}},
            {"added_tokens", {added(0, "[PAD]"), added(2, "[CLS]"), added(3, "[SEP]"), added(4, "[MASK]")}}};
  }
  SpecialTokens read(const json& tokenizer) const {
    folder_.write("tokenizer.json", tokenizer.dump());
    return read_special_tokens(folder_.path(""));
  }
  void refuse(const json& tokenizer, const std::vector<std::string>& parts) const {
    auto all = parts;
    all.emplace_back("tokenizer.json");
    expect_error([&] { read(tokenizer); }, all);
  }

  TempFolder folder_;
};

TEST_F(Special, ReadsThoseOfBert) {
  const SpecialTokens tokens = read(bert());
  EXPECT_EQ(tokens.begin, 2);
  EXPECT_EQ(tokens.end, 3);
  EXPECT_EQ(tokens.mask, 4);
  EXPECT_EQ(tokens.all, (Ids{0, 2, 3, 4}));
  EXPECT_EQ(tokens.vocab, 8);
}

TEST_F(Special, ReadsThoseOfRobertaAndUnigram) {
  const json scores = json::array({json::array({"<s>", 0}), json::array({"</s>", 0}), json::array({"x", -1})});
  const json tokenizer = {
      {"model", {{"type", "Unigram"}, {"vocab", scores}}},
      {"added_tokens", {added(0, "<s>"), added(1, "</s>"), added(9, "<mask>"), added(5, "word", false)}}};
  const SpecialTokens tokens = read(tokenizer);
  EXPECT_EQ(tokens.begin, 0);
  EXPECT_EQ(tokens.end, 1);
  EXPECT_EQ(tokens.mask, 9);
  EXPECT_EQ(tokens.all, (Ids{0, 1, 9}));
  EXPECT_EQ(tokens.vocab, 10);
}

TEST_F(Special, ReadsNamesFromTheConfigurationBesideIt) {
  json tokenizer = bert();
  tokenizer["added_tokens"].push_back(added(11, "<hidden>"));
  folder_.write("tokenizer_config.json", R"({"mask_token": {"content": "<hidden>"}, "cls_token": "a"})");
  const SpecialTokens tokens = read(tokenizer);
  EXPECT_EQ(tokens.mask, 11);
  EXPECT_EQ(tokens.begin, 7);  // not marked as special, but used as one
  EXPECT_EQ(tokens.all, (Ids{0, 2, 3, 4, 7, 11}));
}

TEST_F(Special, RefusesBadTokenizers) {
  json tokenizer = bert();
  tokenizer["added_tokens"].erase(3);
  tokenizer["model"]["vocab"].erase("[MASK]");
  refuse(tokenizer, {"no mask_token", "[MASK] or <mask>"});
  tokenizer = bert();
  tokenizer["added_tokens"][0]["id"] = -5;
  refuse(tokenizer, {"not a tokenizer", "id"});
  tokenizer["added_tokens"][0]["id"] = 1.5;
  refuse(tokenizer, {"not a tokenizer", "id"});
  tokenizer["added_tokens"][0]["id"] = int64_t{1} << 40;
  refuse(tokenizer, {"not a tokenizer", "id"});
  tokenizer["added_tokens"] = 5;
  refuse(tokenizer, {"not a tokenizer", "added_tokens"});
  tokenizer["added_tokens"] = {1, 2};
  refuse(tokenizer, {"not a tokenizer"});
  tokenizer = bert();
  tokenizer["model"]["vocab"]["b"] = "x";
  refuse(tokenizer, {"not a tokenizer", "id"});
  tokenizer["model"].erase("vocab");
  refuse(tokenizer, {"no model.vocab"});
  refuse(json::array(), {"not a JSON object"});
  folder_.write("tokenizer.json", "{");
  expect_error([&] { read_special_tokens(folder_.path("")); }, {"tokenizer.json", "not JSON"});
  expect_error([&] { read_special_tokens(folder_.path("none")); }, {"none"});
}

// Any change in a tokenizer.json gives tokens within the vocabulary, or an Error.
TEST_F(Special, SurvivesRandomDamage) {
  const std::string whole = bert().dump();
  std::mt19937 random(1);
  for (int i = 0; i < 2000; ++i) {
    std::string text = whole;
    for (unsigned c = 0; c <= random() % 3; ++c) text[random() % text.size()] = static_cast<char>(32 + random() % 95);
    folder_.write("tokenizer.json", text);
    try {
      const SpecialTokens tokens = read_special_tokens(folder_.path("tokenizer.json"));
      for (const int64_t id : {tokens.begin, tokens.end, tokens.mask, tokens.all.front(), tokens.all.back()}) {
        EXPECT_GE(id, 0);
        EXPECT_LT(id, tokens.vocab);
      }
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("tokenizer.json"), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
