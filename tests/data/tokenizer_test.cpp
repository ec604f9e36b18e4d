// Tests encoding with a tokenizer.json, hostile files, and a Python that misbehaves.
#include "twobp/data/text/tokenizer.h"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include <gtest/gtest.h>

#include "tokenizer_files.h"
#include "twobp/core/check.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::byte_tokenizer;
using test::Environment;
using test::expect_error;
using test::TempFolder;
using test::word_tokenizer;
using test::write_program;
using Ids = std::vector<int64_t>;

Ids bytes_of(const std::string& text) {
  const auto* begin = reinterpret_cast<const unsigned char*>(text.data());
  return {begin, begin + text.size()};
}

class TokenizerTest : public test::WithTokenizers {
 protected:
  std::string write(const nlohmann::json& json) const { return folder_.write("tokenizer.json", json.dump()); }
};

Ids encode(Tokenizer& tokenizer, const std::string& text) {
  const TempFolder folder;
  std::string all;
  tokenizer.encode_all(InputFile(folder.write("text", text)), [&](std::string_view part) { all += part; });
  const auto width = static_cast<size_t>(token_bytes(token_type_for(tokenizer.vocab())));
  Ids ids;
  for (size_t at = 0; at < all.size(); at += width) {
    uint32_t id = 0;
    std::memcpy(&id, all.data() + at, width);
    ids.push_back(id);
  }
  return ids;
}

TEST_F(TokenizerTest, Encodes) {
  Tokenizer tokenizer(write(byte_tokenizer(/*merge=*/true)));
  EXPECT_EQ(tokenizer.vocab(), 258);
  EXPECT_EQ(tokenizer.end_of_text(), 257);
  const std::string text = "a tab\t, \xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80\n\nend";
  EXPECT_EQ(encode(tokenizer, text), bytes_of(text));
  EXPECT_EQ(encode(tokenizer, "hehe he"), (Ids{256, 256, ' ', 256}));
  EXPECT_EQ(encode(tokenizer, ""), Ids{});
  EXPECT_EQ(encode(tokenizer, "a<|endoftext|>"), (Ids{'a', 257}));
}

TEST_F(TokenizerTest, ReadsAFolderWithATokenizer) {
  write(word_tokenizer({{"yes", 1}, {"no", 7}}));
  Tokenizer tokenizer(folder_.path(""));
  EXPECT_EQ(tokenizer.vocab(), 8);  // the largest id plus 1, though there are only 3 tokens
  EXPECT_EQ(tokenizer.end_of_text(), std::nullopt);
  EXPECT_EQ(encode(tokenizer, "no yes perhaps"), (Ids{7, 1, 0}));
}

TEST_F(TokenizerTest, TakesTheEndOfTextFromTheConfigurationBesideIt) {
  const std::string path = write(byte_tokenizer());
  folder_.write("tokenizer_config.json", R"({"eos_token": "A"})");
  EXPECT_EQ(Tokenizer(path).end_of_text(), 'A');
  folder_.write("tokenizer_config.json", R"({"eos_token": {"content": "B"}})");
  EXPECT_EQ(Tokenizer(path).end_of_text(), 'B');
  // A wrong name there gives no error.
  for (const char* config : {R"({"eos_token": "none of them"})", R"({"eos_token": 5})", "[1]", "{", "\xff"}) {
    folder_.write("tokenizer_config.json", config);
    EXPECT_EQ(Tokenizer(path).end_of_text(), 256) << config;
  }
}

TEST_F(TokenizerTest, AddsNoSpecialTokens) {
  nlohmann::json json = byte_tokenizer();
  json["post_processor"] = {
      {"type", "TemplateProcessing"},
      {"single",
       {{{"SpecialToken", {{"id", "<|endoftext|>"}, {"type_id", 0}}}}, {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}}},
      {"pair", {{{"Sequence", {{"id", "A"}, {"type_id", 0}}}}, {{"Sequence", {{"id", "B"}, {"type_id", 1}}}}}},
      {"special_tokens",
       {{"<|endoftext|>", {{"id", "<|endoftext|>"}, {"ids", {256}}, {"tokens", {"<|endoftext|>"}}}}}}};
  Tokenizer tokenizer(write(json));
  EXPECT_EQ(encode(tokenizer, "ab"), (Ids{'a', 'b'}));
}

TEST_F(TokenizerTest, IgnoresTruncationAndPaddingInTheFile) {
  nlohmann::json json = byte_tokenizer();
  json["truncation"] = {{"direction", "Right"}, {"max_length", 3}, {"strategy", "LongestFirst"}, {"stride", 0}};
  json["padding"] = {
      {"strategy", {{"Fixed", 9}}}, {"direction", "Right"}, {"pad_to_multiple_of", nullptr}, {"pad_id", 0},
      {"pad_type_id", 0},           {"pad_token", "!"}};
  Tokenizer tokenizer(write(json));
  EXPECT_EQ(encode(tokenizer, "abcde"), bytes_of("abcde"));
  std::string all;
  tokenizer.encode_all(InputFile(folder_.write("a.txt", "abcde")), [&](std::string_view part) { all += part; });
  EXPECT_EQ(all, test::raw_bytes<uint16_t>({'a', 'b', 'c', 'd', 'e'}));
}

// Python looks for modules in the current folder first. It must not import a file from there.
TEST_F(TokenizerTest, DoesNotRunFilesInTheCurrentFolder) {
  const std::string path = write(byte_tokenizer());
  for (const char* name : {"tokenizers.py", "json.py", "array.py", "signal.py"}) {
    folder_.write(name, "raise SystemExit('run by mistake')");
  }
  const Environment python("TWOBP_PYTHON", test::absolute_python());
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(folder_.path(""));
  EXPECT_NO_THROW(EXPECT_EQ(Tokenizer(path).vocab(), 257));
  std::filesystem::current_path(before);
}

// ---- whole texts

// Every text comes back byte for byte, wherever it is cut.
TEST_F(TokenizerTest, EncodesLongTextsWhole) {
  Tokenizer tokenizer(write(byte_tokenizer()));
  std::mt19937 random(3);
  const size_t piece = 1 << 18;
  std::vector<std::string> texts = {"", "x", std::string(2 * piece + 5, '\n'), std::string(2 * piece + 5, ' ')};
  std::string lines;
  while (lines.size() < 9 * piece)
    lines += std::string(random() % 200, 'a' + random() % 26) + (random() % 3 == 0 ? "\n\n" : "\n");
  texts.push_back(lines);
  for (size_t shift = 0; shift < 4; ++shift) {  // There is no good place to cut, and characters cross every boundary.
    std::string wide(shift, 'x');
    while (wide.size() < piece + 1000) wide += "\xf0\x9f\x98\x80\xe2\x82\xac";
    texts.push_back(wide);
  }
  for (const auto& text : texts) {
    std::string all;
    tokenizer.encode_all(InputFile(folder_.write("a.txt", text)), [&](std::string_view part) { all += part; });
    ASSERT_EQ(all.size(), 2 * text.size());
    size_t wrong = 0;
    for (size_t i = 0; i < text.size(); ++i) wrong += all[2 * i] != text[i] || all[2 * i + 1] != 0;
    EXPECT_EQ(wrong, 0U);
  }
}

TEST_F(TokenizerTest, FindsBytesThatAreNotUtf8Anywhere) {
  const std::string path = write(byte_tokenizer());
  for (const size_t at : {size_t{0}, size_t{5}, size_t{(1 << 20) + 17}}) {
    std::string text(2 << 20, 'a');
    text[at] = '\xff';
    Tokenizer tokenizer(path);
    expect_error([&] { tokenizer.encode_all(InputFile(folder_.write("my.txt", text)), [](std::string_view) {}); },
                 {"my.txt", "byte " + std::to_string(at), "UTF-8"});
  }
  Tokenizer tokenizer(path);
  expect_error([&] { encode(tokenizer, "a\xff"); }, {"text: byte 1", "not UTF-8"});
}

// ---- bad input

TEST_F(TokenizerTest, RefusesHostileFiles) {
  expect_error([&] { Tokenizer(folder_.path("none.json")); }, {"none.json", "no such file"});
  expect_error([&] { Tokenizer(folder_.path("")); }, {"tokenizer.json", "no such file", "a folder with"});
  nlohmann::json no_model = byte_tokenizer();
  no_model.erase("model");
  nlohmann::json unknown = byte_tokenizer();
  unknown["model"]["type"] = "Unheard";
  nlohmann::json merges = byte_tokenizer();
  merges["model"]["merges"] = nlohmann::json::array({"nowhere to"});
  nlohmann::json negative = word_tokenizer({{"a", -1}});
  nlohmann::json large = word_tokenizer({{"a", int64_t{1} << 40}});
  nlohmann::json pattern = byte_tokenizer();
  pattern["pre_tokenizer"] = {
      {"type", "Split"}, {"pattern", {{"Regex", "(("}}}, {"behavior", "Isolated"}, {"invert", false}};
  std::vector<std::string> contents = {"",
                                       "null",
                                       "{}",
                                       "[]",
                                       "\xff\xfe",
                                       std::string(1000, '\0'),
                                       std::string(200000, '['),
                                       byte_tokenizer().dump().substr(0, 1500)};
  for (const auto& json : {no_model, unknown, merges, negative, large, pattern}) contents.push_back(json.dump());
  for (size_t i = 0; i < contents.size(); ++i) {
    const std::string& content = contents[i];
    const std::string path = folder_.write("tokenizer.json", content);
    SCOPED_TRACE(i);
    try {
      Tokenizer tokenizer(path);
      ADD_FAILURE() << "accepted, with " << tokenizer.vocab() << " tokens";
    } catch (const Error& error) {
      const std::string what = error.what();
      EXPECT_EQ(what.find(path), 0U) << what;
      EXPECT_EQ(what.find('\n'), std::string::npos) << what;
      EXPECT_GT(what.size(), path.size() + 5) << what;
    }
  }
}

TEST_F(TokenizerTest, RefusesAnEmptyVocabulary) {
  nlohmann::json empty = byte_tokenizer();
  empty["model"]["vocab"] = nlohmann::json::object();
  empty["added_tokens"] = nlohmann::json::array();
  expect_error([&] { Tokenizer(write(empty)); }, {"no tokens"});
}

// A damaged file gives an Error, or a tokenizer that encodes something.
TEST_F(TokenizerTest, SurvivesRandomDamage) {
  const std::string whole = byte_tokenizer(true).dump();
  std::mt19937 random(11);
  int refused = 0;
  for (int round = 0; round < 20; ++round) {
    std::string content = whole;
    for (int i = 0; i < 3; ++i) content[random() % content.size()] ^= static_cast<char>(1 << random() % 8);
    const std::string path = folder_.write("tokenizer.json", content);
    try {
      Tokenizer tokenizer(path);
      for (const int64_t id : encode(tokenizer, "the end")) EXPECT_LT(id, tokenizer.vocab());
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 5);
}

// ---- a Python that misbehaves; this needs no package

class Misbehaving : public testing::Test {
 protected:
  void expect(const std::string& body, const std::vector<std::string>& parts, double timeout = 20) const {
    const Environment python("TWOBP_PYTHON", write_program(folder_, "python", body));
    const std::string path = folder_.write("tokenizer.json", byte_tokenizer().dump());
    expect_error(
        [&] {
          Tokenizer tokenizer(path, timeout);
          encode(tokenizer, "text");
        },
        parts);
  }

  TempFolder folder_;
};

TEST_F(Misbehaving, IsReported) {
  const std::string hello = R"(echo '{"vocab": 5, "end_of_text": null}'; )";
  expect("exit 3", {"tokenizer.json: ", "exit code 3"});
  expect("echo no such module >&2; exit 1", {"exit code 1: no such module"});
  expect("echo hello", {"no JSON object", "TWOBP_PYTHON"});
  expect("echo '[1]'", {"no JSON object"});
  expect(R"(echo '{"error": "pip install it"}')", {"tokenizer.json: pip install it"});
  expect(R"(echo '{"error": 5}')", {"tokenizer.json: 5"});
  expect("echo '{}'", {"no valid \"vocab\""});
  expect(R"(echo '{"vocab": -5}')", {"no valid \"vocab\""});
  expect(R"(echo '{"vocab": 1e30}')", {"no valid \"vocab\""});
  expect(R"(echo '{"vocab": 0}')", {"no tokens"});
  expect(R"(echo '{"vocab": 5, "end_of_text": 5}')", {"no valid \"end_of_text\""});
  expect(hello + "read line; kill -9 $$", {"killed by signal 9"});
  // It reads no more than a line: if it ended, the rest might find nobody to take it.
  expect(hello + R"(read line; echo '{"tokens": ["a"]}'; exec sleep 100)", {"no valid \"tokens\""});
  expect(hello + "exec sleep 100", {"did nothing for"}, 0.5);
}

TEST_F(Misbehaving, SaysWhatToInstallWithoutThePackage) {
  // -S hides the installed packages.
  expect("exec '" + test::absolute_python() + "' -S -E \"$@\"",
         {"tokenizer.json: ", "lacks the package tokenizers", "pip install tokenizers=="});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
