// Tests tokenized text on disk: it is made once and used again, remade after any change, and never half written.
#include "twobp/data/text/token_cache.h"

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sys/resource.h>
#include <thread>

#include <gtest/gtest.h>

#include "tokenizer_files.h"
#include "twobp/data/data.h"

namespace twobp::TWOBP_FILE {
namespace {

namespace fs = std::filesystem;
using test::byte_tokenizer;
using test::Environment;
using test::expect_error;
using test::read_file;
using test::TempFolder;
using test::word_tokenizer;
using test::write_program;

std::string as_tokens(const std::string& text) {
  return test::raw_bytes(std::vector<uint16_t>(text.begin(), text.end()));
}

class TokenCache : public test::WithTokenizers {
 protected:
  void SetUp() override {
    WithTokenizers::SetUp();
    tokenizer_ = folder_.write("tokenizer.json", byte_tokenizer().dump());
    // This Python records each start.
    counting_ = write_program(
        folder_, "python", "echo >> '" + folder_.path("starts") + "'; exec '" + test::absolute_python() + "' \"$@\"");
    python_.emplace("TWOBP_PYTHON", counting_);
    user_cache_.emplace("XDG_CACHE_HOME", folder_.path("user-cache"));
  }

  TokenizedText tokenize(const std::vector<std::string>& texts, int64_t vocab = 300) const {
    return tokenize_text(texts, tokenizer_, folder_.path("cache"), vocab, /*end_of_text=*/false);
  }
  // Returns the tokens of one text.
  std::string tokens(const std::string& text) const {
    const TokenizedText out = tokenize({text});
    return out.files.size() == 1 ? read_file(out.files[0]) : "";
  }
  size_t starts() const { return read_file(folder_.path("starts")).size(); }
  std::vector<std::string> cached() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_.path("cache"))) {
      const std::string name = entry.path().filename();
      if (name != "lock") names.push_back(name);
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  std::string tokenizer_;
  std::string counting_;
  std::optional<Environment> python_;
  std::optional<Environment> user_cache_;
};

TEST_F(TokenCache, IsMadeOnceAndUsedAgain) {
  const std::string a = folder_.write("a.txt", "hello");
  const std::string b = folder_.write("b.txt", "world, again");
  const TokenizedText first = tokenize({b, a});
  ASSERT_EQ(first.files.size(), 1U);
  EXPECT_EQ(first.type, TokenType::kUInt16);
  EXPECT_EQ(read_file(first.files[0]), as_tokens("world, againhello"));
  EXPECT_EQ(starts(), 1U);  // one start for both
  EXPECT_EQ(cached().size(), 2U);
  EXPECT_EQ(tokenize({b, a}).files, first.files);
  EXPECT_EQ(starts(), 1U);
  EXPECT_EQ(tokens(a), as_tokens("hello"));  // other texts are another entry
  EXPECT_EQ(starts(), 2U);
  const Environment none("TWOBP_PYTHON", folder_.path("no_python"));  // no Python is needed
  EXPECT_EQ(tokenize({b, a}).files, first.files);
}

TEST_F(TokenCache, IsRemadeWhenTheTextChanges) {
  const std::string path = folder_.write("a.txt", "hello");
  EXPECT_EQ(tokens(path), as_tokens("hello"));
  folder_.write("a.txt", "hello there");
  EXPECT_EQ(tokens(path), as_tokens("hello there"));
  // The file is as long as before, but newer.
  const auto time = fs::last_write_time(path);
  folder_.write("a.txt", "HELLO THERE");
  fs::last_write_time(path, time + std::chrono::seconds(1));
  EXPECT_EQ(tokens(path), as_tokens("HELLO THERE"));
  EXPECT_EQ(starts(), 3U);
  // The file is as long and as old as before: it is written over, as by cp -p, and moved into place, as by rsync -t.
  const auto same = fs::last_write_time(path);
  std::ofstream(path) << "hello again";
  fs::last_write_time(path, same);
  EXPECT_EQ(tokens(path), as_tokens("hello again"));
  const std::string other = folder_.write("new.txt", "HELLO AGAIN");
  fs::last_write_time(other, same);
  fs::rename(other, path);
  EXPECT_EQ(tokens(path), as_tokens("HELLO AGAIN"));
  EXPECT_EQ(starts(), 5U);
  EXPECT_EQ(cached().size(), 2U);  // they replace the old ones
  // A text of the same name in another folder is another text.
  fs::create_directory(folder_.path("sub"));
  EXPECT_EQ(tokens(folder_.write("sub/a.txt", "other")), as_tokens("other"));
  EXPECT_EQ(tokens(path), as_tokens("HELLO AGAIN"));
  EXPECT_EQ(starts(), 6U);
}

TEST_F(TokenCache, IsRemadeWhenTheTokenizerChanges) {
  const std::string path = folder_.write("a.txt", "hehe");
  EXPECT_EQ(tokens(path), as_tokens("hehe"));
  folder_.write("tokenizer.json", byte_tokenizer(/*merge=*/true).dump());
  EXPECT_EQ(tokens(path), test::raw_bytes<uint16_t>({256, 256}));
  folder_.write("tokenizer.json", byte_tokenizer().dump());
  EXPECT_EQ(tokens(path), as_tokens("hehe"));
  EXPECT_EQ(starts(), 2U);                                          // the first entry is still there
  folder_.write("tokenizer_config.json", R"({"eos_token": "h"})");  // it may change the end-of-text token
  EXPECT_EQ(tokens(path), as_tokens("hehe"));
  EXPECT_EQ(starts(), 3U);
}

// A killed run or a full disk may leave such entries behind.
TEST_F(TokenCache, RemakesDamagedEntries) {
  const std::string path = folder_.write("a.txt", "hello");
  const std::string bin = tokenize({path}).files.at(0);
  const std::string description = bin.substr(0, bin.size() - 4) + ".json";
  const std::string good = read_file(description);
  ASSERT_NE(good.find("\"tokens\": 5"), std::string::npos) << good;
  const auto replaced = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    return text.replace(text.find(from), from.size(), to);
  };
  size_t made = 1;
  const auto damage = [&](const std::string& tokens_now, const std::string& description_now) {
    std::ofstream(bin, std::ios::binary) << tokens_now;
    std::ofstream(description, std::ios::binary) << description_now;
    EXPECT_EQ(tokens(path), as_tokens("hello")) << description_now;
    EXPECT_EQ(starts(), ++made) << description_now;
    EXPECT_EQ(read_file(description), good);
  };
  damage(as_tokens("hell"), good);
  damage(as_tokens("hello") + "x", good);
  damage("", good);
  for (const std::string& text :
       {std::string(), good.substr(0, good.size() / 2), std::string("[]"), std::string("{}"), std::string("\xff"),
        replaced("\"tokens\": 5", "\"tokens\": 4"), replaced("\"tokens\": 5", "\"tokens\": -5"),
        replaced("\"tokens\": 5", "\"tokens\": \"5\""), replaced("\"tokens\": 5", "\"tokens\": 9223372036854775813"),
        replaced("\"vocab\": 257", "\"vocab\": 0"), replaced("\"vocab\": 257", "\"vocab\": 70000"),
        replaced("\"format\": 7", "\"format\": 1"), replaced("a.txt\"", "b.txt\""),
        "{\"source\": " + std::string(200000, '[') + std::string(200000, ']') + "}"}) {
    damage(as_tokens("hello"), text);
  }
  fs::remove(bin);
  EXPECT_EQ(tokens(path), as_tokens("hello"));
  fs::remove(description);
  EXPECT_EQ(tokens(path), as_tokens("hello"));
  EXPECT_EQ(starts(), made + 2);
  std::ofstream(bin + ".new") << "half of anoth";  // left by a run that was killed
  folder_.write("a.txt", "hello!");
  EXPECT_EQ(tokens(path), as_tokens("hello!"));
  EXPECT_EQ(cached().size(), 2U);
}

TEST_F(TokenCache, KeepsNothingOfAKilledPython) {
  const std::string path = folder_.write("a.txt", "hello");
  {
    const Environment killed("TWOBP_PYTHON", write_program(folder_, "killed",
                                                           R"(echo '{"vocab": 257, "end_of_text": null}'; read line; )"
                                                           R"(echo '{"tokens": 5}'; printf hel; kill -9 $$)"));
    expect_error([&] { tokenize({path}); }, {"killed by signal 9"});
  }
  EXPECT_EQ(cached(), std::vector<std::string>{});
  EXPECT_EQ(tokens(path), as_tokens("hello"));
}

TEST_F(TokenCache, KeepsNothingOnAFullDisk) {
  const std::string path = folder_.write("a.txt", std::string(100000, 'a'));
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small = {20000, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  expect_error([&] { tokenize({path}); }, {"cannot write", "File too large"});
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(cached(), std::vector<std::string>{});
  EXPECT_EQ(tokens(path).size(), 200000U);
}

TEST_F(TokenCache, IsMadeOnceByTwoRunsAtOnce) {
  std::vector<std::string> texts;
  for (int i = 0; i < 4; ++i) {
    texts.push_back(folder_.write(std::to_string(i) + ".txt", std::string(50000, static_cast<char>('a' + i))));
  }
  std::vector<TokenizedText> results(3);
  std::vector<std::thread> threads;
  for (auto& result : results) threads.emplace_back([&] { result = tokenize(texts); });
  for (auto& thread : threads) thread.join();
  for (const auto& result : results) EXPECT_EQ(result.files, results[0].files);
  ASSERT_EQ(results[0].files.size(), 1U);
  EXPECT_EQ(read_file(results[0].files[0]).substr(300000), as_tokens(std::string(50000, 'd')));
  EXPECT_EQ(starts(), 1U);
}

TEST_F(TokenCache, Needs32BitsForLargeVocabularies) {
  tokenizer_ = folder_.write("words.json", word_tokenizer({{"yes", 65536}, {"no", 3}}).dump());
  const std::string path = folder_.write("a.txt", "no yes\nyes");
  const TokenizedText text = tokenize({path}, 65537);
  EXPECT_EQ(text.type, TokenType::kUInt32);
  EXPECT_EQ(read_file(text.files.at(0)), test::raw_bytes<uint32_t>({3, 65536, 65536}));
  tokenizer_ = folder_.write("words.json", word_tokenizer({{"yes", 65535}, {"no", 3}}).dump());
  EXPECT_EQ(read_file(tokenize({path}, 65536).files.at(0)), test::raw_bytes<uint16_t>({3, 65535, 65535}));
}

TEST_F(TokenCache, RefusesATokenizerLargerThanTheVocabulary) {
  const std::string path = folder_.write("a.txt", "hello");
  expect_error([&] { tokenize({path}, 256); },
               {"tokenizer.json", "vocabulary of 257", "model.vocab is 256", "set model.vocab to 257"});
  EXPECT_EQ(cached(), std::vector<std::string>{});
  EXPECT_NO_THROW(tokenize({path}, 257));
  expect_error([&] { tokenize({path}, 256); }, {"vocabulary of 257", "model.vocab is 256"});  // from the cache
}

TEST_F(TokenCache, RefusesBadTexts) {
  const std::string good = folder_.write("a.txt", "hello");
  expect_error([&] { tokenize({good, folder_.path("none.txt")}); }, {"none.txt", "cannot open"});
  expect_error([&] { tokenize({folder_.write("b.txt", "caf\xe9")}); }, {"b.txt", "byte 3 is not UTF-8", "iconv"});
  EXPECT_EQ(cached().size(), 0U);
  EXPECT_EQ(tokenize({folder_.write("empty.txt", "")}).files, std::vector<std::string>{});
  EXPECT_EQ(tokens(folder_.write("caf\xe9 \xff.txt", "strange name")), as_tokens("strange name"));
  EXPECT_EQ(tokens(folder_.write(std::string(200, 'n') + ".txt", "long name")), as_tokens("long name"));
  const size_t so_far = starts();
  EXPECT_EQ(tokens(folder_.path("caf\xe9 \xff.txt")), as_tokens("strange name"));
  EXPECT_EQ(starts(), so_far);
}

// ---- the place of the cache

TEST_F(TokenCache, LiesInTheUsersCache) {
  const std::string path = folder_.write("a.txt", "hello");
  const auto folder_of = [&](const std::string& cache) {
    return fs::path(tokenize_text({path}, tokenizer_, cache, 300, true).files.at(0)).parent_path();
  };
  {
    const Environment user("XDG_CACHE_HOME", folder_.path("user"));
    EXPECT_EQ(folder_of(""), folder_.path("user/twobp"));
  }
  const Environment unset("XDG_CACHE_HOME", "");
  {
    const Environment home("HOME", folder_.path("home"));
    EXPECT_EQ(folder_of(""), folder_.path("home/.cache/twobp"));
    EXPECT_EQ(folder_of(folder_.path("deep/er")), folder_.path("deep/er"));
  }
  const Environment nowhere("HOME", "");
  expect_error([&] { folder_of(""); }, {"cannot keep tokenized text", "XDG_CACHE_HOME", "data.cache"});
  const std::string in_the_way = folder_.write("file", "as good as a folder that cannot be written, for root too");
  expect_error([&] { folder_of(in_the_way); }, {"cannot keep tokenized text", in_the_way, "data.cache"});
}

TEST_F(TokenCache, EndsTextsWithAnEndOfTextToken) {
  std::vector<std::string> texts = {folder_.write("a.txt", "ab"), folder_.write("b.txt", ""),
                                    folder_.write("c.txt", "c<|endoftext|>"), folder_.write("d.txt", "d")};
  const auto tokens_of = [&](bool end_of_text) {
    return read_file(tokenize_text(texts, tokenizer_, folder_.path("cache"), 300, end_of_text).files.at(0));
  };
  constexpr uint16_t kEnd = 256;
  EXPECT_EQ(tokens_of(true), test::raw_bytes<uint16_t>({'a', 'b', kEnd, 'c', kEnd, 'd', kEnd}));
  EXPECT_EQ(tokens_of(false), test::raw_bytes<uint16_t>({'a', 'b', 'c', kEnd, 'd'}));
  EXPECT_EQ(tokens_of(true), test::raw_bytes<uint16_t>({'a', 'b', kEnd, 'c', kEnd, 'd', kEnd}));
  EXPECT_EQ(starts(), 2U);
}

// ---- the cache as data

DataConfig data_config(const std::string& text, int64_t sequence) {
  DataConfig data;
  data.text = text;
  data.sequence = sequence;
  data.held_out = 0;
  data.end_of_text = false;
  return data;
}

TEST_F(TokenCache, GivesSamplesOfTokenizedText) {
  folder_.write("a.txt", "no yes\nyes no");
  folder_.write("b.txt", "");
  folder_.write("c.txt", "maybe yes");
  DataConfig data = data_config(folder_.path("*.txt"), 2);
  data.tokenizer = folder_.write("words.json", word_tokenizer({{"yes", 1}, {"no", 2}}).dump());
  ModelInput model;
  model.vocab = 3;
  const auto samples = open_data(data, model, 1).train;
  // The tokens 2 1 1 2 0 1 make two samples of two tokens, and the last target.
  ASSERT_EQ(samples->size(), 2);
  const Fields fields = samples->read({0, 1}, 0);
  EXPECT_TRUE(at::equal(fields.at("input_ids"), at::tensor({2, 1, 1, 2}, at::kLong).view({2, 2})));
  EXPECT_TRUE(at::equal(fields.at("labels"), at::tensor({1, 1, 2, 0}, at::kLong).view({2, 2})));
  data.sequence = 6;
  expect_error([&] { open_data(data, model, 1); },
               {"data.text", "1 file, 6 tokens", "too little text", "7 tokens are needed"});
  data.text = folder_.path("b.txt");
  expect_error([&] { open_data(data, model, 1); }, {"0 files, 0 tokens", "too little text"});
  data.text = folder_.path("x.txt");
  expect_error([&] { open_data(data, model, 1); }, {"data.text: no file matches"});
}

TEST_F(TokenCache, UsesTheTokenizerOfAModelFolder) {
  DataConfig data = data_config(folder_.write("a.txt", "hehe"), 1);
  ModelInput model;
  model.vocab = 258;
  fs::create_directory(folder_.path("model"));
  model.from = folder_.path("model");
  EXPECT_EQ(tokenizer_of(data, model), "");
  expect_error([&] { open_data(data, model, 1); }, {"model.vocab is 258", "no tokenizer.json in", "data.tokenizer"});
  model.vocab = 256;
  EXPECT_EQ(open_data(data, model, 1).train->size(), 3);  // bytes
  model.vocab = 258;
  folder_.write("model/tokenizer.json", byte_tokenizer(/*merge=*/true).dump());
  EXPECT_EQ(open_data(data, model, 1).train->size(), 1);
  EXPECT_EQ(tokenizer_of(data, model), folder_.path("model/tokenizer.json"));
  data.tokenizer = tokenizer_;
  EXPECT_EQ(tokenizer_of(data, model), tokenizer_);
  EXPECT_EQ(open_data(data, model, 1).train->size(), 3);
  data.tokenizer.clear();
  model.from.clear();
  EXPECT_EQ(tokenizer_of(data, model), "");
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
