// Chats: the template's text, and the loss on the assistant's turns alone.
#include "twobp/data/text/chat.h"

#include <gtest/gtest.h>

#include "tokenizer_files.h"
#include "twobp/data/data.h"
#include "twobp/data/text/packed_dataset.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;
using test::expect_error;

// "u:hi\na:yes\n"
constexpr const char* kPlain =
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.role[0] + ':' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'a:' }}{% endif %}";
// The same with marks, but the newline after an answer is not marked.
constexpr const char* kMarked =
    "{% for m in messages %}{{ m.role[0] + ':' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content "
    "}}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}";
// Begins only the last answer with a thought, as Qwen3 does.
constexpr const char* kThinking =
    "{% for m in messages %}{{ m.role[0] + ':' + ('<t></t>' if loop.last and m.role == 'assistant' else '') "
    "+ m.content | trim + ';\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'a:' }}{% endif %}";
// Removes earlier answers.
constexpr const char* kForgetful =
    "{% for m in messages %}{{ m.role[0] + ':' + (m.content if loop.last or m.role == 'user' else '-') + "
    "'\n' }}{% endfor %}";

json message(const std::string& role, const std::string& content) {
  return {{"role", role}, {"content", content}};
}

class Chats : public test::WithTokenizers {
 protected:
  void SetUp() override {
    WithTokenizers::SetUp();
    folder_.write("tokenizer.json", test::byte_tokenizer().dump());
    static const bool missing =
        std::system((test::absolute_python() + " -c \"import importlib.util, sys; "
                                               "sys.exit(importlib.util.find_spec('transformers') is None)\"")
                        .c_str()) != 0;
    if (missing) GTEST_SKIP() << "Python has no transformers";
  }
  std::string tokenizer(const std::string& chat_template) {
    folder_.write(
        "tokenizer_config.json",
        json{{"tokenizer_class", "PreTrainedTokenizerFast"}, {"chat_template", chat_template}}.dump());
    return folder_.path("tokenizer.json");
  }
};

// The characters of the tokens, which are bytes, and those of them that count.
std::pair<std::string, std::string> texts_of(const EncodedChat& chat) {
  std::string all, counted;
  for (const int64_t id : chat.ids) all += static_cast<char>(id);
  for (const auto& [begin, end] : chat.counted) counted += all.substr(begin, end - begin) + "|";
  return {all, counted};
}

TEST_F(Chats, TurnsOfTheAssistantCount) {
  const json chat = {message("system", "\xc3\xa9"), message("user", "hi"), message("assistant", "yes"),
                     message("user", "so"), message("assistant", "\xc3\xa9 no")};
  const std::string text = "s:\xc3\xa9\nu:hi\na:yes\nu:so\na:\xc3\xa9 no\n";
  const Document document = {chat.dump(), true, "chats.jsonl:7"};
  ChatEncoder plain(tokenizer(kPlain));
  EXPECT_EQ(texts_of(plain.encode(document)),
            (std::pair<std::string, std::string>{text, "yes\n|\xc3\xa9 no\n|"}));

  const auto refuse = [&](ChatEncoder& encoder, const json& messages, const std::vector<std::string>& parts) {
    std::vector<std::string> all = parts;
    all.emplace_back("chats.jsonl:7");
    expect_error([&] { encoder.encode({messages.dump(), true, "chats.jsonl:7"}); }, all);
  };
  refuse(plain, json::array({message("user", "hi")}), {"no turn of the assistant", "remove it"});
  refuse(plain, {message("assistant", "yes"), message("tool", "x")}, {"no tools here"});
  refuse(plain, json::array(), {"list of messages"});
  refuse(plain, json::array({{{"content", "hi"}}}), {"role"});
  refuse(plain, json::array({{{"role", "assistant"}}}), {"content"});
  EXPECT_EQ(texts_of(plain.encode(document)).first, text) << "it goes on";
}

TEST_F(Chats, MarksOfTheTemplateSayWhatCounts) {
  ChatEncoder marked(tokenizer(kMarked));
  const json chat = {message("user", "hi"), message("assistant", "yes"), message("assistant", "no")};
  EXPECT_EQ(texts_of(marked.encode({chat.dump(), true, ""})),
            (std::pair<std::string, std::string>{"u:hi\na:yes\na:no\n", "yes|no|"}));
}

TEST_F(Chats, AreWhatIsTrainedOn) {
  DataConfig data;
  data.tokenizer = tokenizer(kPlain);
  data.cache = folder_.path("cache");
  data.field = "messages";
  data.packing = "whole";
  data.sequence = 24;
  data.held_out = 0;
  ModelInput model;
  model.vocab = 257;
  model.documents = true;
  const auto line = [](const json& messages) { return json{{"messages", messages}}.dump() + "\n"; };
  const std::string good = line({message("user", "hi"), message("assistant", "yes")}) +
                           line({message("assistant", "no"), message("user", "a")});
  data.text = folder_.write("a.jsonl", good);
  const Fields fields = open_data(data, model, 1).train->read({0}, 0);
  std::string targets;
  const at::Tensor labels = fields.at("labels")[0];
  for (int64_t i = 0; i < labels.size(0); ++i) {
    const auto label = labels[i].item<int64_t>();
    targets += label == kIgnoredLabel ? '.' : static_cast<char>(label);
  }
  // u:hi a:yes, then a:no u:a, then padding. The first turn of the second chat has nothing before it.
  EXPECT_EQ(targets, "......yes\n.:no\n.........");
  data.text = folder_.write("b.jsonl", R"({"messages": "text"})"
                                       "\n\n" +
                                           good);
  expect_error([&] { open_data(data, model, 1); }, {"b.jsonl:3", "is a chat", "texts"});
  data.text = folder_.path("a.jsonl");
  data.packing = "stream";
  expect_error([&] { open_data(data, model, 1); }, {"chats", "data.packing"});
}

TEST_F(Chats, TurnsMayBeRenderedOtherwiseWhenTheyAreLast) {
  ChatEncoder thinking(tokenizer(kThinking));
  const json chat = {message("user", "hi"), message("assistant", " yes "), message("user", "so"),
                     message("assistant", "no")};
  EXPECT_EQ(
      texts_of(thinking.encode({chat.dump(), true, ""})),
      (std::pair<std::string, std::string>{"u:hi;\na:yes;\nu:so;\na:<t></t>no;\n", "yes;\n|<t></t>no;\n|"}));
}

TEST_F(Chats, NeedATemplateThatTellsTurnsApart) {
  ChatEncoder forgetful(tokenizer(kForgetful));
  const json chat = {message("user", "a"), message("assistant", "b"), message("user", "c")};
  expect_error(
      [&] {
        forgetful.encode({chat.dump(), true, "chats.jsonl:2"});
      },
      {"chats.jsonl:2", "message 2", "generation"});
  folder_.write("tokenizer_config.json", R"({"tokenizer_class": "PreTrainedTokenizerFast"})");
  expect_error([&] { ChatEncoder(folder_.path("tokenizer.json")); }, {"no chat template"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
