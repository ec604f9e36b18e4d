// Tests chats: the text that the template makes, and that only the assistant's turns count in the loss.
#include <gtest/gtest.h>

#include "tokenizer_files.h"
#include "twobp/data/data.h"
#include "twobp/data/text/packed_dataset.h"
#include "twobp/data/text/tokenizer.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;
using test::expect_error;

// This template makes "u:hi\na:yes\n".
constexpr const char* kPlain =
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.role[0] + ':' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'a:' }}{% endif %}";
// This template also marks the generated text. The newline after an answer is not marked.
constexpr const char* kMarked =
    "{% for m in messages %}{{ m.role[0] + ':' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content "
    "}}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}";
// This template adds a thought to the last answer only, as Qwen3 does.
constexpr const char* kThinking =
    "{% for m in messages %}{{ m.role[0] + ':' + ('<t></t>' if loop.last and m.role == 'assistant' else '') "
    "+ m.content | trim + ';\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'a:' }}{% endif %}";
// This template removes earlier answers.
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
    folder_.write("tokenizer_config.json",
                  json{{"tokenizer_class", "PreTrainedTokenizerFast"}, {"chat_template", chat_template}}.dump());
    return folder_.path("tokenizer.json");
  }
};

// Returns the text of all tokens, which are bytes, and the text of those that count.
std::pair<std::string, std::string> texts_of(const EncodedChat& chat) {
  std::string all, counted;
  for (const int64_t id : chat.ids) all += static_cast<char>(id);
  for (const auto& [begin, end] : chat.counted) counted += all.substr(begin, end - begin) + "|";
  return {all, counted};
}

// These are single tokens in current tokenizers. Their ids lie above those of the bytes.
const std::vector<std::string> kTokens = {"<bos>", "<eos>", "<end>", "<user>", "<assistant>"};

// Does the same as texts_of, but with these tokens.
std::pair<std::string, std::string> bytes_of(const EncodedChat& chat) {
  const auto text = [&](int64_t begin, int64_t end) {
    std::string out;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t id = chat.ids[static_cast<size_t>(i)];
      out += id > 256 ? kTokens.at(static_cast<size_t>(id - 257)) : std::string(1, static_cast<char>(id));
    }
    return out;
  };
  std::string counted;
  for (const auto& [begin, end] : chat.counted) counted += text(begin, end) + "|";
  return {text(0, static_cast<int64_t>(chat.ids.size())), counted};
}

TEST_F(Chats, CountTheTurnsOfTheAssistant) {
  const json chat = {message("system", "\xc3\xa9"), message("user", "hi"), message("assistant", "yes"),
                     message("user", "so"), message("assistant", "\xc3\xa9 no")};
  const std::string text = "s:\xc3\xa9\nu:hi\na:yes\nu:so\na:\xc3\xa9 no\n";
  const Document document = {chat.dump(), true, "chats.jsonl:7"};
  ChatEncoder plain(tokenizer(kPlain));
  EXPECT_EQ(texts_of(plain.encode(document)), (std::pair<std::string, std::string>{text, "yes\n|\xc3\xa9 no\n|"}));

  const auto refuse = [&](ChatEncoder& encoder, const json& messages, const std::vector<std::string>& parts) {
    std::vector<std::string> all = parts;
    all.emplace_back("chats.jsonl:7");
    expect_error([&] { encoder.encode({messages.dump(), true, "chats.jsonl:7"}); }, all);
  };
  refuse(plain, json::array({message("user", "hi")}), {"no turn of the assistant", "remove it"});
  refuse(plain, {message("assistant", "yes"), message("tool", "x")}, {"no tools here"});
  refuse(plain, json::array(), {"list of messages"});
  refuse(plain, json::array({{{"content", "hi"}}}), {"role"});
  refuse(plain, {message("user", "hi"), {{"role", "assistant"}}}, {"message 2", "'assistant'", "no content"});
  refuse(plain, {{{"role", "user"}, {"content", nullptr}}, message("assistant", "yes")}, {"message 1", "no content"});
  refuse(plain, {{{"role", "user"}, {"content", 5}}, message("assistant", "yes")}, {"message 1", "is 5, not a text"});
  EXPECT_EQ(texts_of(plain.encode(document)).first, text) << "it goes on";
}

// These templates have the traits of current families of models.
struct Style {
  const char* name;
  const char* chat_template;
  const char* text;     // the rendered text of a user's "hi", an answer " yes ", "so" and "no"
  const char* counted;  // the parts of the text that count
  const char* system;   // the text that a system message adds before "hi"; null if it is refused
};
const std::vector<Style> kStyles = {
    // This is ChatML with a default system message (Qwen2).
    {"chatml",
     "{% if messages[0].role != 'system' %}{{ '<s>system\nBe kind<e>\n' }}{% endif %}{% for m in messages %}"
     "{{ '<s>' + m.role + '\n' + m.content + '<e>\n' }}{% endfor %}"
     "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}",
     "<s>system\nBe kind<e>\n<s>user\nhi<e>\n<s>assistant\n yes <e>\n<s>user\nso<e>\n<s>assistant\nno<e>\n",
     " yes <e>\n|no<e>\n|", "<s>system\nhush<e>\n<s>user\nhi<e>\n"},
    // This template marks the generated text and leaves out the newline after a turn (SmolLM3).
    {"marked",
     "{% for m in messages %}{{ '<s>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
     "{{ m.content + '<e>' }}{% endgeneration %}{% else %}{{ m.content + '<e>' }}{% endif %}{{ '\n' }}{% "
     "endfor %}",
     "<s>user\nhi<e>\n<s>assistant\n yes <e>\n<s>user\nso<e>\n<s>assistant\nno<e>\n", " yes <e>|no<e>|",
     "<s>system\nhush<e>\n<s>user\nhi<e>\n"},
    // This template starts with a token, trims contents and ends a turn without a newline (Llama-3).
    {"headers",
     "{{ bos_token }}{% for m in messages %}{{ '<h>' + m.role + '</h>\n\n' + m.content | trim + '<eot>' }}{% "
     "endfor %}"
     "{% if add_generation_prompt %}{{ '<h>assistant</h>\n\n' }}{% endif %}",
     "<bos><h>user</h>\n\nhi<eot><h>assistant</h>\n\nyes<eot><h>user</h>\n\nso<eot><h>assistant</"
     "h>\n\nno<eot>",
     "yes<eot>|no<eot>|", "<bos><h>system</h>\n\nhush<eot><h>user</h>\n\nhi<eot>"},
    // This template has no system message. Turns must alternate, and the assistant has another name (Gemma).
    {"alternating",
     "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
     "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
     "{{ raise_exception('roles must alternate') }}{% endif %}"
     "{{ '<t>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '</t>\n' }}{% "
     "endfor %}"
     "{% if add_generation_prompt %}{{ '<t>model\n' }}{% endif %}",
     "<bos><t>user\nhi</t>\n<t>model\nyes</t>\n<t>user\nso</t>\n<t>model\nno</t>\n", "yes</t>\n|no</t>\n|", nullptr},
    // Instructions stand in brackets, with the system message inside. No generation prompt follows (Mistral).
    {"brackets",
     "{{ bos_token }}{% if messages[0].role == 'system' %}{% set head = messages[0].content + '\n\n' %}"
     "{% set rest = messages[1:] %}{% else %}{% set head = '' %}{% set rest = messages %}{% endif %}"
     "{% for m in rest %}{% if m.role == 'user' %}{{ '[I] ' + (head if loop.first else '') + m.content + "
     "'[/I]' }}"
     "{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}"
     "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}",
     "<bos>[I] hi[/I] yes<eos>[I] so[/I] no<eos>", " yes<eos>| no<eos>|", "<bos>[I] hush\n\nhi[/I]"},
    // A token at the end takes the place of a generation prompt (Phi-3).
    {"ended",
     "{% for m in messages %}{{ '<' + m.role + '>\n' + m.content + '<end>\n' }}{% endfor %}"
     "{% if add_generation_prompt %}{{ '<assistant>\n' }}{% else %}{{ eos_token }}{% endif %}",
     "<user>\nhi<end>\n<assistant>\n yes <end>\n<user>\nso<end>\n<assistant>\nno<end>\n<eos>",
     " yes <end>\n|no<end>\n<eos>|", "<system>\nhush<end>\n<user>\nhi<end>\n"},
};

TEST_F(Chats, CountTheTurnsOfTheAssistantInEveryStyle) {
  const json chat = {message("user", "hi"), message("assistant", " yes "), message("user", "so"),
                     message("assistant", "no")};
  for (const Style& style : kStyles) {
    SCOPED_TRACE(style.name);
    const std::string file = tokenizer(style.chat_template);
    json config = json::parse(test::read_file(folder_.path("tokenizer_config.json")));
    config["bos_token"] = kTokens[0];
    config["eos_token"] = kTokens[1];
    for (size_t i = 0; i < kTokens.size(); ++i) {
      config["added_tokens_decoder"][std::to_string(257 + i)] = {{"content", kTokens[i]}, {"lstrip", false},
                                                                 {"normalized", false},   {"rstrip", false},
                                                                 {"single_word", false},  {"special", true}};
    }
    folder_.write("tokenizer_config.json", config.dump());
    ChatEncoder encoder(file);
    const auto encode = [&](const json& messages) {
      return bytes_of(encoder.encode({messages.dump(), true, "chats.jsonl:7"}));
    };
    EXPECT_EQ(encode(chat), (std::pair<std::string, std::string>{style.text, style.counted}));
    const json with_system = {message("system", "hush"), message("user", "hi"), message("assistant", "no")};
    if (style.system) {
      const auto [text, counted] = encode(with_system);
      EXPECT_TRUE(text.starts_with(style.system)) << text;
      const std::string last = style.counted;
      EXPECT_EQ(counted, last.substr(last.find('|') + 1));
    } else {
      expect_error([&] { encode(with_system); }, {"chats.jsonl:7", "no system role"});
    }
    if (std::string_view(style.name) == "alternating") {
      const json twice = {message("user", "a"), message("user", "b"), message("assistant", "c")};
      expect_error([&] { encode(twice); }, {"chats.jsonl:7", "roles must alternate"});
    }
    if (std::string_view(style.name) == "brackets") {
      const json tool = {message("user", "a"), message("assistant", "c"), message("tool", "b")};
      expect_error([&] { encode(tool); }, {"chats.jsonl:7", "only user and assistant"});
    }
    if (std::string_view(style.name) == "chatml") {
      const json begun = {message("assistant", "hi"), message("user", "hi"), message("assistant", "hi")};
      EXPECT_EQ(encode(begun).second, "hi<e>\n|hi<e>\n|") << "neither the system's message nor the role";
    }
  }
}

TEST_F(Chats, CountTheTextThatTheTemplateMarks) {
  ChatEncoder marked(tokenizer(kMarked));
  const json chat = {message("user", "hi"), message("assistant", "yes"), message("assistant", "no")};
  EXPECT_EQ(texts_of(marked.encode({chat.dump(), true, ""})),
            (std::pair<std::string, std::string>{"u:hi\na:yes\na:no\n", "yes|no|"}));
}

// With offsets without spaces, as GPT-2's tokenizer has them. transformers before 5.24 counts other tokens:
// the whole chat after a turn of one token, none from a turn that begins with a space on, and what follows a
// turn that ends with one.
TEST_F(Chats, CountTheMarkedTextWhateverItsOffsetsAre) {
  json trimmed = test::byte_tokenizer();
  trimmed["post_processor"] = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}};
  folder_.write("tokenizer.json", trimmed.dump());
  const std::string turn =
      "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
      "{% else %}{{ m.content }}{% endif %}";
  const std::string bare = "{% for m in messages %}" + turn + "{% endfor %}";
  const std::string laid_out =
      "{% for m in messages %}\n{{ m.role[0] + ':' }}\n{% if m.role == 'assistant' %}\n  {%- generation -%}\n"
      "  {{ m.content }}\n  {%- endgeneration %}\n{% else %}\n{{ m.content }}\n{% endif %};\n{% endfor %}";
  const std::string within = "{% macro turn(m) %}{{ m.role[0] + ':' }}" + turn +
                             "{% endmacro %}{% for m in messages %}{{ turn(m) }};{% endfor %}";
  const auto counted = [&](const std::string& chat_template, const json& chat) {
    ChatEncoder encoder(tokenizer(chat_template));
    return texts_of(encoder.encode({chat.dump(), true, "chats.jsonl:7"})).second;
  };
  const json first = {message("assistant", "y"), message("user", "hi"), message("assistant", "no")};
  EXPECT_EQ(counted(bare, first), "y|no|");
  const json spaces = {message("user", "hi"), message("assistant", "b yes"), message("user", "so"),
                       message("assistant", "no")};
  EXPECT_EQ(counted(bare, spaces), "b yes|no|");
  const json ended = {message("user", "hi"), message("assistant", "yes \n"), message("user", "so")};
  EXPECT_EQ(counted(bare, ended).substr(0, 3), "yes");
  EXPECT_EQ(counted(bare, ended).find("so"), std::string::npos);
  EXPECT_EQ(counted(laid_out, spaces), "b yes|no|");
  EXPECT_EQ(counted(within, spaces), "b yes|no|") << "transformers counts from the beginning of the macro";
  const std::string stripped =
      "{% for m in messages %}{% set text %}" + turn + "{% endset %}{{ text | trim }};{% endfor %}";
  const json padded = {message("user", "hi"), message("assistant", " yes ")};
  expect_error([&] { counted(stripped, padded); }, {"chats.jsonl:7", "after it has marked it"});
}

// Words keep their leading space, and their offsets do not.
TEST_F(Chats, CountATurnThatBeginsWithASpace) {
  json words = test::byte_tokenizer(/*merge=*/true);
  words["model"]["vocab"]["\xc4\xa0he"] = 258;
  words["model"]["merges"].push_back("\xc4\xa0 he");
  words["post_processor"] = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}};
  folder_.write("tokenizer.json", words.dump());
  ChatEncoder encoder(tokenizer(kMarked));
  const json chat = {message("user", "a"), message("assistant", " he"), message("user", "b"),
                     message("assistant", "c")};
  const EncodedChat encoded = encoder.encode({chat.dump(), true, ""});
  EXPECT_EQ(encoded.ids[6], 258);
  EXPECT_EQ(encoded.counted, (std::vector<std::pair<int64_t, int64_t>>{{6, 7}, {14, 15}}));
}

// This template renders calls of tools and drops what it does not know (Qwen2.5 and LLaMa 3.1 do).
constexpr const char* kCalling =
    "{% for m in messages %}{% if 'tool_calls' in m %}{{ 'a:' }}{% if m.content %}{{ m.content + ' ' }}{% "
    "endif %}"
    "{% for c in m.tool_calls %}{{ '<' + c.function.name + c.function.arguments | tojson + '>' }}{% endfor "
    "%}"
    "{{ '\n' }}{% elif m.role in ['user', 'assistant', 'tool'] %}{{ m.role[0] + ':' + m.content + '\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'a:' }}{% endif %}";

TEST_F(Chats, CountTheCallsOfTools) {
  ChatEncoder encoder(tokenizer(kCalling));
  const json calls = {{{"type", "function"}, {"function", {{"name", "add"}, {"arguments", {{"x", 1}}}}}},
                      {{"type", "function"}, {"function", {{"name", "get"}, {"arguments", json::object()}}}}};
  for (const json& content : {json("wait"), json(""), json(nullptr)}) {
    const json chat = {{{"role", "user"}, {"content", "hi"}, {"tool_calls", nullptr}},
                       {{"role", "assistant"}, {"content", content}, {"tool_calls", calls}},
                       message("tool", "get"),
                       message("assistant", "yes")};
    const std::string call = std::string(content == "wait" ? "wait " : "") + "<add{\"x\": 1}><get{}>\n";
    EXPECT_EQ(texts_of(encoder.encode({chat.dump(), true, ""})),
              (std::pair<std::string, std::string>{"u:hi\na:" + call + "t:get\na:yes\n", call + "|yes\n|"}));
  }
}

// This template renders tools, whose keys keep their order.
constexpr const char* kTools =
    "{% if tools %}{{ tools | tojson + '\n' }}{% endif %}{% for m in messages %}{% if m.tool_calls %}"
    "{{ 'a:' + m.tool_calls | tojson + '\n' }}{% else %}{{ m.role[0] + ':' + m.content + '\n' }}{% endif "
    "%}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}";

TEST_F(Chats, GiveTheirToolsToTheTemplate) {
  const std::string chat = R"({"tools": TOOLS, "messages": [{"role": "user", "content": "hi"}, )"
                           R"({"role": "assistant", "content": "yes"}, {"role": "assistant", "tool_calls": )"
                           R"([{"name": "f", "arguments": {"b": 1, "a": 2}}]}, {"role": "user", "content": "so"}]})";
  const std::string calls = R"([{"name": "f", "arguments": {"b": 1, "a": 2}}])";
  const auto text = [&](const std::string& chat_template, const std::string& tools) {
    std::string line = chat;
    line.replace(line.find("TOOLS"), 5, tools);
    ChatEncoder encoder(tokenizer(chat_template));
    std::string out;
    for_each_document({folder_.write("chats.jsonl", line)}, "messages",
                      [&](const Document& one) { out = texts_of(encoder.encode(one)).first; });
    return out;
  };
  const std::string tools = R"([{"type": "function", "function": {"name": "f", "description": null}}])";
  const std::string rest = "u:hi\na:yes\na:" + calls + "\nu:so\n";
  EXPECT_EQ(text(kTools, tools), tools + "\n" + rest);
  EXPECT_EQ(text(kTools, json(tools).dump()), tools + "\n" + rest) << "as text";
  EXPECT_EQ(text(kTools, "[]"), rest);
  EXPECT_EQ(text(kTools, "null"), rest);
  ChatEncoder plain(tokenizer(kPlain));
  const Document lost = {.text = json{message("user", "hi"), message("assistant", "yes")}.dump(),
                         .chat = true,
                         .origin = "chats.jsonl:1",
                         .tools = tools};
  expect_error([&] { plain.encode(lost); }, {"chats.jsonl:1", "leaves out the record's tools", "remove the field"});
}

TEST_F(Chats, TakeTheTemplateForToolsOfSeveral) {
  const std::string file = tokenizer("");
  const json templates = {{{"name", "default"}, {"template", kPlain}}, {{"name", "tool_use"}, {"template", kTools}}};
  folder_.write("tokenizer_config.json",
                json{{"tokenizer_class", "PreTrainedTokenizerFast"}, {"chat_template", templates}}.dump());
  ChatEncoder encoder(file);
  const std::string chat = json{message("user", "hi"), message("assistant", "yes")}.dump();
  EXPECT_EQ(texts_of(encoder.encode({chat, true, ""})).first, "u:hi\na:yes\n");
  EXPECT_EQ(texts_of(encoder.encode({chat, true, "", R"([{"name": "f"}])"})).first,
            "[{\"name\": \"f\"}]\nu:hi\na:yes\n");
}

TEST_F(Chats, MayNotLoseAMessage) {
  ChatEncoder encoder(tokenizer(kCalling));
  const auto refuse = [&](const json& chat, const std::vector<std::string>& parts) {
    expect_error([&] { encoder.encode({chat.dump(), true, "chats.jsonl:7"}); }, parts);
  };
  // Its content occurs elsewhere in the text, so a search for it would not tell.
  refuse({message("user", "hi"), message("narrator", "hi"), message("assistant", "hi")},
         {"chats.jsonl:7", "message 2", "narrator"});
  const json parts = {{"role", "user"}, {"content", {{{"type", "text"}, {"text", "hi"}}}}};
  refuse({parts, message("assistant", "hi")}, {"chats.jsonl:7", "cannot render", "concatenate"});
  const json odd = {message("user", "\xee\x80\x80"), message("assistant", "\xee\x80\x81")};
  EXPECT_EQ(texts_of(encoder.encode({odd.dump(), true, ""})).second, "\xee\x80\x81\n|") << "characters for private use";
}

TEST_F(Chats, BecomeTrainingData) {
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
  // The tokens are "u:hi a:yes", then "a:no u:a", then padding. No prompt precedes the first turn of the
  // second chat.
  EXPECT_EQ(targets, "......yes\n..no\n.........");
  data.text = folder_.write("b.jsonl", R"({"messages": "text"})"
                                       "\n\n" +
                                           good);
  expect_error([&] { open_data(data, model, 1); }, {"b.jsonl:3", "is a chat", "texts"});
  data.text = folder_.path("a.jsonl");
  data.packing = "stream";
  expect_error([&] { open_data(data, model, 1); }, {"chats", "data.packing"});
}

TEST_F(Chats, AllowTheLastTurnToBeRenderedDifferently) {
  ChatEncoder thinking(tokenizer(kThinking));
  const json chat = {message("user", "hi"), message("assistant", " yes "), message("user", "so"),
                     message("assistant", "no")};
  EXPECT_EQ(texts_of(thinking.encode({chat.dump(), true, ""})),
            (std::pair<std::string, std::string>{"u:hi;\na:yes;\nu:so;\na:<t></t>no;\n", "yes;\n|<t></t>no;\n|"}));
}

TEST_F(Chats, NeedATemplateThatKeepsTurnsApart) {
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
