// Tests config.json of Hugging Face directories: both notations of the rope settings, unsupported values, and the
// configuration derived from the file.
#include "twobp/models/hf_config.h"

#include <cmath>
#include <filesystem>
#include <functional>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/model_options.h"
#include "tests/train/helpers.h"
#include "twobp/config/section.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;
using test::expect_error;
using test::TempFolder;

json llama_json() {
  return {{"model_type", "llama"},     {"architectures", {"LlamaForCausalLM"}},
          {"hidden_size", 576},        {"num_hidden_layers", 30},
          {"num_attention_heads", 9},  {"num_key_value_heads", 3},
          {"intermediate_size", 1536}, {"vocab_size", 49152},
          {"rms_norm_eps", 1e-5},      {"rope_theta", 100000},
          {"rope_scaling", nullptr},   {"tie_word_embeddings", true},
          {"hidden_act", "silu"},      {"max_position_embeddings", 8192},
          {"bos_token_id", 0}};
}

const json kLlama3 = {{"rope_type", "llama3"},
                      {"factor", 8},
                      {"low_freq_factor", 1.0},
                      {"high_freq_factor", 4.0},
                      {"original_max_position_embeddings", 4096}};

class HfConfig : public ::testing::Test {
 protected:
  DecoderOptions read(const json& content) const {
    folder_.write("config.json", content.dump());
    return read_hf_config(folder_.path("")).as<DecoderOptions>();
  }
  DecoderOptions read(const std::function<void(json&)>& change) const {
    json content = llama_json();
    change(content);
    return read(content);
  }
  void refuse(const std::function<void(json&)>& change, std::vector<std::string> parts) const {
    parts.emplace_back("config.json");
    expect_error([&] { read(change); }, parts);
  }

  TempFolder folder_;
};

TEST_F(HfConfig, ReadsTheArchitecture) {
  const DecoderOptions config = read(llama_json());
  EXPECT_EQ(read_hf_config(folder_.path("")).name(), "llama");
  EXPECT_EQ(config.dim, 576);
  EXPECT_EQ(config.layers, 30);
  EXPECT_EQ(config.heads, 9);
  EXPECT_EQ(config.kv_heads, 3);
  EXPECT_EQ(config.head_dim, 64);
  EXPECT_EQ(config.hidden, 1536);
  EXPECT_EQ(config.vocab, 49152);
  EXPECT_EQ(config.norm_eps, 1e-5);
  EXPECT_EQ(config.rope_theta, 100000);
  EXPECT_EQ(config.rope_scaling, "none");
  EXPECT_TRUE(config.tied);
  EXPECT_EQ(read([](json& c) { c["head_dim"] = 80; }).head_dim, 80);
  EXPECT_EQ(read([](json& c) { c["head_dim"] = nullptr; }).head_dim, 64);
}

// Missing keys have the defaults of transformers' LlamaConfig.
TEST_F(HfConfig, HasTheDefaultsOfTransformers) {
  const DecoderOptions config = read([](json& c) {
    for (const char* key : {"num_key_value_heads", "rms_norm_eps", "rope_theta", "rope_scaling", "hidden_act",
                            "tie_word_embeddings", "architectures"}) {
      c.erase(key);
    }
  });
  EXPECT_EQ(config.kv_heads, 9);
  EXPECT_EQ(config.norm_eps, 1e-6);
  EXPECT_EQ(config.rope_theta, 10000);
  EXPECT_FALSE(config.tied);
}

TEST_F(HfConfig, ReadsRopeSettingsInBothForms) {
  for (const bool new_form : {false, true}) {
    const auto with = [&](json settings, json theta) {
      return read([&](json& c) {
        c.erase("rope_theta");
        c.erase("rope_scaling");
        if (new_form) {
          settings["rope_theta"] = theta;
          c["rope_parameters"] = settings;
        } else {
          c["rope_theta"] = theta;
          c["rope_scaling"] = settings;
        }
      });
    };
    DecoderOptions config = with({{"rope_type", "default"}}, 500.5);
    EXPECT_EQ(config.rope_theta, 500.5);
    EXPECT_EQ(config.rope_scaling, "none");
    config = with({{"rope_type", "linear"}, {"factor", 2.5}}, 300);
    EXPECT_EQ(config.rope_theta, 300);
    EXPECT_EQ(config.rope_scaling, "linear");
    EXPECT_EQ(config.rope_factor, 2.5);
    EXPECT_EQ(with({{"type", "linear"}, {"factor", 2}}, 300).rope_scaling,
              "linear");  // format before transformers 4.43
    config = with(kLlama3, 500000);
    EXPECT_EQ(config.rope_theta, 500000);
    EXPECT_EQ(config.rope_scaling, "llama3");
    EXPECT_EQ(config.rope_factor, 8);
    EXPECT_EQ(config.rope_low_freq, 1);
    EXPECT_EQ(config.rope_high_freq, 4);
    EXPECT_EQ(config.rope_original_positions, 4096);
    for (const char* type : {"longrope", "su", "proportional"}) {
      expect_error(
          [&] {
            with({{"rope_type", type}, {"factor", 2}}, 1e4);
          },
          {"config.json", type, "not supported", "default, linear, llama3, yarn, dynamic are"});
    }
    expect_error([&] { with({{"rope_type", "linear"}}, 1e4); }, {"has no factor"});
    expect_error([&] { with({{"rope_type", "linear"}, {"factor", "2"}}, 1e4); }, {"factor is \"2\", not a number"});
    expect_error([&] { with({{"rope_type", "linear"}, {"factor", 0}}, 1e4); }, {"model.rope_factor is 0"});
    expect_error([&] { with({{"rope_type", 3}}, 1e4); }, {"rope_type is 3"});
    expect_error(
        [&] {
          with({{"rope_type", "default"}, {"partial_rotary_factor", 0.5}}, 1e4);
        },
        {"partial_rotary_factor"});
    expect_error([&] { with({{"rope_type", "default"}}, -1); }, {"model.rope_theta is -1"});
    config = with({{"rope_type", "yarn"}, {"factor", 4}, {"original_max_position_embeddings", 100}}, 1e4);
    EXPECT_EQ(config.rope_scaling, "yarn");
    EXPECT_EQ(config.rope_factor, 4);
    EXPECT_EQ(config.rope_original_positions, 100);
    EXPECT_EQ(config.rope_beta_fast, 32);
    EXPECT_EQ(config.rope_beta_slow, 1);
    EXPECT_EQ(config.rope_attention_factor, 0);
    config = with({{"rope_type", "yarn"}, {"factor", 4}, {"mscale", 2}, {"mscale_all_dim", 1}}, 1e4);
    EXPECT_EQ(config.rope_original_positions, 8192);  // max_position_embeddings
    EXPECT_NEAR(config.rope_attention_factor, (0.2 * std::log(4) + 1) / (0.1 * std::log(4) + 1), 1e-12);
    config = with({{"rope_type", "dynamic"}, {"factor", 3}}, 1e4);
    EXPECT_EQ(config.rope_scaling, "dynamic");
    EXPECT_EQ(config.rope_original_positions, 8192);
    EXPECT_TRUE(config.rope_whole_pairs);
    EXPECT_FALSE(with({{"rope_type", "yarn"}, {"factor", 4}, {"truncate", false}}, 1e4).rope_whole_pairs);
    expect_error(
        [&] {
          with({{"rope_type", "linear"}, {"factor", 4}, {"truncate", false}}, 1e4);
        },
        {"config.json", "truncate", "not supported with rope_type \"linear\""});
    expect_error(
        [&] {
          with({{"rope_type", "linear"}, {"factor", 4}, {"beta_fast", 8}}, 1e4);
        },
        {"config.json", "beta_fast 8 is not supported with rope_type \"linear\""});
    for (const char* key : {"factor", "low_freq_factor", "high_freq_factor"}) {
      json settings = kLlama3;
      settings.erase(key);
      expect_error([&] { with(settings, 1e4); }, {"config.json", concat("has no ", key)});
    }
    json settings = kLlama3;
    settings["low_freq_factor"] = 4.0;
    expect_error([&] { with(settings, 1e4); }, {"low_freq_factor must be below"});
  }
  refuse([](json& c) { c["rope_scaling"] = "linear"; }, {"rope_scaling is \"linear\", not an object"});
}

TEST_F(HfConfig, ReadsAndWritesLongrope) {
  json content = llama_json();  // with 9 heads of 64 features
  content.update({{"model_type", "phi3"},
                  {"architectures", {"Phi3ForCausalLM"}},
                  {"max_position_embeddings", 4096},
                  {"original_max_position_embeddings", 1024},
                  {"rope_scaling",
                   {{"type", "longrope"},
                    {"short_factor", std::vector<double>(32, 1.5)},
                    {"long_factor", std::vector<int>(32, 7)}}}});
  const DecoderOptions o = read(content);
  EXPECT_EQ(o.rope_scaling, "longrope");
  EXPECT_EQ(o.rope_factor, 4);
  EXPECT_EQ(o.rope_original_positions, 1024);
  EXPECT_EQ(o.rope_short, std::vector<double>(32, 1.5));
  EXPECT_EQ(o.rope_long, std::vector<double>(32, 7));
  ModelConfig config;
  config.type = ModelOptions("phi3");
  config.type.as<DecoderOptions>() = o;
  const json written = hf_config_json(config, 512, "float32");
  EXPECT_EQ(written["original_max_position_embeddings"], 1024);
  EXPECT_EQ(written["rope_scaling"]["factor"], 4) << "max_position_embeddings may now be another";
  content["rope_scaling"]["long_factor"][3] = "7";
  expect_error([&] { read(content); }, {"config.json", "long_factor has \"7\", not a number"});
}

TEST_F(HfConfig, RefusesUnsupportedSettings) {
  refuse([](json& c) { c["model_type"] = "bloom"; },
         {"\"bloom\" is not supported", "llama (LlamaForCausalLM)", "qwen3 (Qwen3ForCausalLM)"});
  refuse([](json& c) { c["model_type"] = json::array(); }, {"a list", "llama (LlamaForCausalLM)"});
  refuse([](json& c) { c.erase("model_type"); }, {"no model_type"});
  refuse([](json& c) { c["architectures"] = {"LlamaForSequenceClassification"}; }, {"LlamaForCausalLM"});
  refuse([](json& c) { c["architectures"] = "LlamaForCausalLM"; }, {"architectures"});
  refuse([](json& c) { c["attention_bias"] = "no"; }, {"attention_bias is \"no\", not true or false"});
  refuse([](json& c) { c["hidden_act"] = "relu"; }, {"hidden_act \"relu\"", "\"silu\"", "\"gelu_new\""});
  refuse([](json& c) { c["attention_dropout"] = 1.5; }, {"model.attention_dropout is 1.5"});
  refuse([](json& c) { c["sliding_window"] = 4; },
         {"sliding_window is 4, which is not supported with model_type \"llama\"", "remove it"});
  refuse([](json& c) { c["layer_types"] = {"full_attention", "sliding_attention"}; }, {"layer_types is a list"});
  EXPECT_NO_THROW(read([](json& c) { c["layer_types"] = {"full_attention"}; }));
  EXPECT_NO_THROW(read([](json& c) { c["use_magic"] = false; }));  // it requests nothing
  EXPECT_NO_THROW(read([](json& c) { c["sliding_window"] = nullptr; }));
  refuse([](json& c) { c["quantization_config"] = {{"bits", 4}}; }, {"quantized"});
}

// The windows of layers come from a list, or from other keys.
TEST_F(HfConfig, ReadsTheWindowsOfLayers) {
  const auto windows = [&](const char* type, const char* hf_class, const json& more) {
    json content = llama_json();
    content.update({{"model_type", type}, {"architectures", {hf_class}}, {"num_hidden_layers", 6}});
    content.update(more);
    folder_.write("config.json", content.dump());
    return read_hf_config(folder_.path("")).as<DecoderOptions>().windows;
  };
  using List = std::vector<int>;
  const auto mistral = [&](const json& more) { return windows("mistral", "MistralForCausalLM", more); };
  EXPECT_EQ(mistral({{"sliding_window", 7}}), List{7});
  EXPECT_EQ(mistral({{"sliding_window", nullptr}}), List());
  EXPECT_EQ(mistral(json::object()), List{4096});  // the default of the class
  expect_error([&] { mistral({{"sliding_window", 0}}); }, {"config.json", "sliding_window is 0", "no key"});
  expect_error([&] { mistral({{"sliding_window", -3}}); }, {"sliding_window is -3, not an integer from 1"});
  const auto qwen3 = [&](const json& more) { return windows("qwen3", "Qwen3ForCausalLM", more); };
  const json on = {{"use_sliding_window", true}, {"sliding_window", 8}};
  const auto with = [&](json more) {
    more.update(on);
    return more;
  };
  EXPECT_EQ(qwen3({{"sliding_window", 8}}), List());
  EXPECT_EQ(qwen3(with({{"max_window_layers", 4}})), (List{0, 0, 0, 0, 8, 8}));
  const std::string full = "full_attention", sliding = "sliding_attention";
  EXPECT_EQ(qwen3(with({{"layer_types", {full, sliding, full, sliding, full, sliding}}})), (List{0, 8}));
  expect_error([&] { qwen3(with({{"layer_types", {full}}})); }, {"layer_types has 1 entries for 6 layers"});
  expect_error(
      [&] {
        qwen3(with({{"layer_types", {full, full, full, full, full, "linear_attention"}}}));
      },
      {"layer_types has \"linear_attention\"", "not supported"});
  const auto gemma = [&](const json& more) { return windows("gemma2", "Gemma2ForCausalLM", more); };
  EXPECT_EQ(gemma({{"sliding_window", 5}}), (List{5, 0}));
  const auto smollm = [&](const json& more) { return windows("smollm3", "SmolLM3ForCausalLM", more); };
  EXPECT_EQ(smollm(with({{"no_rope_layers", {1, 1, 0, 1, 1, 0}}})), (List{0, 0, 8}));
  EXPECT_EQ(smollm(with({{"no_rope_layer_interval", 2}})), (List{0, 8}));
}

TEST_F(HfConfig, RefusesBadNumbers) {
  for (const char* key :
       {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"}) {
    refuse([&](json& c) { c.erase(key); }, {concat("has no ", key)});
    refuse([&](json& c) { c[key] = -1; }, {concat(key, " is -1, not an integer")});
    refuse([&](json& c) { c[key] = 2.5; }, {concat(key, " is 2.5, not an integer")});
    refuse([&](json& c) { c[key] = "8"; }, {concat(key, " is \"8\", not an integer")});
    refuse([&](json& c) { c[key] = UINT64_MAX; }, {key, "not an integer"});
    refuse([&](json& c) { c[key] = INT64_MAX; }, {});
    refuse([&](json& c) { c[key] = 0; }, {});
  }
  refuse([](json& c) { c["num_key_value_heads"] = 2; }, {"num_key_value_heads 2", "num_attention_heads 9"});
  refuse([](json& c) { c["num_key_value_heads"] = 0; }, {"num_key_value_heads 0"});
  refuse([](json& c) { c["num_attention_heads"] = 7; }, {"hidden_size 576", "num_attention_heads 7", "head_dim"});
  refuse([](json& c) { c["head_dim"] = 63; }, {"head_dim 63", "even"});
  refuse([](json& c) { c["head_dim"] = 0; }, {"head_dim 0"});
  refuse([](json& c) { c["rms_norm_eps"] = 0; }, {"model.norm_eps is 0", "above 0"});
  refuse([](json& c) { c["tie_word_embeddings"] = 1; }, {"tie_word_embeddings is 1"});
}

// torch.nn.Embedding reads it in the same way.
TEST_F(HfConfig, ReadsThePaddingToken) {
  EXPECT_EQ(read(llama_json()).pad_token, -1);
  const auto token = [&](const json& value) { return read([&](json& c) { c["pad_token_id"] = value; }).pad_token; };
  EXPECT_EQ(token(nullptr), -1);
  EXPECT_EQ(token(0), 0);
  EXPECT_EQ(token(49151), 49151);
  EXPECT_EQ(token(-1), 49151);
  for (const json& value : {json(49152), json(-49153), json(UINT64_MAX)}) {
    refuse([&](json& c) { c["pad_token_id"] = value; },
           {concat("pad_token_id ", value.dump()), "vocabulary of 49152", "null"});
  }
  refuse([](json& c) { c["pad_token_id"] = {1, 2}; }, {"pad_token_id is a list, not an integer"});
  refuse([](json& c) { c["pad_token_id"] = 1.5; }, {"pad_token_id is 1.5, not an integer"});
}

// A value from the file stays. BERT's default in transformers is 0, so a missing padding token is written as null.
TEST_F(HfConfig, WritesThePaddingToken) {
  ModelConfig bert;
  bert.type = BertOptions{};
  EXPECT_EQ(hf_config_json(bert, 512, "float32").at("pad_token_id"), nullptr);
  bert.type.as<BertOptions>().pad_token = 3;
  json written = hf_config_json(bert, 512, "float32");
  EXPECT_EQ(written.at("pad_token_id"), 3);
  const auto read_bert = [&] {
    folder_.write("config.json", written.dump());
    return read_hf_config(folder_.path("")).as<BertOptions>().pad_token;
  };
  EXPECT_EQ(read_bert(), 3);
  written["pad_token_id"] = nullptr;
  EXPECT_EQ(read_bert(), -1);
  written.erase("pad_token_id");
  EXPECT_EQ(read_bert(), 0);
  ModelConfig llama;
  llama.type = read([](json& c) { c["pad_token_id"] = -2; });
  llama.from = folder_.path("");
  EXPECT_EQ(hf_config_json(llama, 512, "float32").at("pad_token_id"), -2);
  expect_error(
      [] {
        load_config("", {"model.pad_token=256", "data.synthetic=tokens"});
      },
      {"model.pad_token (256)", "vocabulary of 256"});
}

// Otherwise transformers would add the adapter to the model.
TEST_F(HfConfig, RefusesAFolderWithAnAdapter) {
  folder_.write("adapter_config.json", "{}");
  expect_error([&] { read_hf_config(folder_.path("")); },
               {folder_.path(""), "holds an adapter", "model.adapter to this folder"});
  expect_error([&] { read(llama_json()); }, {folder_.path(""), "a model and an adapter", "another folder"});
}

// transformers takes head_dim from the file, but refuses the model anyway.
TEST_F(HfConfig, RefusesToWriteWhatTransformersRefuses) {
  DecoderOptions llama;
  llama.dim = 17;
  llama.heads = 9;
  llama.head_dim = 2;
  ModelConfig config;
  config.type = llama;
  expect_error([&] { hf_config_json(config, 512, "float32"); }, {"transformers", "model.dim (17)", "model.heads (9)"});
}

// A file has no word for options whose 0 follows from others. transformers 5.23 loads no Gemma whose
// query_pre_attn_scalar is null, and needs a sliding_window even where all layers see everything.
TEST_F(HfConfig, WritesWhatFollowsFromOtherOptions) {
  const auto options_of = [](const char* type) {
    ModelOptions options(type);
    auto& decoder = options.as<DecoderOptions>();
    decoder.dim = 32;
    decoder.heads = 2;
    return options;
  };
  const auto written = [](const ModelOptions& options) {
    ModelConfig config;
    config.type = options;
    return hf_config_json(config, 64, "float32");
  };
  for (const char* type : {"gemma2", "gemma3_text"}) {
    ModelOptions options = options_of(type);
    EXPECT_EQ(written(options)["query_pre_attn_scalar"].dump(), "16") << type;
    EXPECT_EQ(written(options)["sliding_window"], 4096) << type;
    options.as<DecoderOptions>().attention_scale = 0.25;
    options.as<DecoderOptions>().windows = {7, 0};
    EXPECT_EQ(written(options)["query_pre_attn_scalar"].dump(), "16") << type;
    EXPECT_EQ(written(options)["sliding_window"], 7) << type;
    options.as<DecoderOptions>().attention_scale = 0.3;
    expect_error([&] { written(options); },
                 {"transformers wants an integer query_pre_attn_scalar", "11.1", "model.attention_scale"});
  }
  EXPECT_EQ(written(options_of("granite"))["attention_multiplier"], 0.25);
  for (const char* key : {"bos_token_id", "eos_token_id"})  // that of LLaMA would be 1 and 2, if it were missing
    EXPECT_TRUE(written(options_of("llama")).contains(key) && written(options_of("llama"))[key].is_null()) << key;
  json granite = llama_json();
  granite.update({{"model_type", "granite"}, {"architectures", {"GraniteForCausalLM"}}, {"attention_multiplier", 0.0}});
  expect_error([&] { read(granite); }, {"config.json", "attention_multiplier is 0, not a number above 0"});
  json gemma = llama_json();
  gemma.update({{"model_type", "gemma"}, {"architectures", {"GemmaForCausalLM"}}});
  for (const char* act : {"gelu", "gelu_pytorch_tanh"}) {  // transformers takes both for tanh's
    gemma["hidden_act"] = act;
    EXPECT_EQ(read(gemma).activation, "gelu_tanh");
  }
  gemma["hidden_act"] = "silu";
  expect_error([&] { read(gemma); }, {"config.json", "hidden_act \"silu\" is not supported"});
  gemma.erase("hidden_act");
  gemma.update(
      {{"model_type", "gemma3_text"}, {"architectures", {"Gemma3ForCausalLM"}}, {"attn_logit_softcapping", nullptr}});
  EXPECT_NO_THROW(read(gemma));
  gemma["attn_logit_softcapping"] = 50.0;  // transformers computes no cap
  expect_error([&] { read(gemma); }, {"config.json", "attn_logit_softcapping 50.0 is not supported"});
}

TEST_F(HfConfig, RefusesBadFiles) {
  const auto refuse_folder = [&](const std::vector<std::string>& parts) {
    expect_error([&] { read_hf_config(folder_.path("")); }, parts);
  };
  refuse_folder({"config.json", "no such file", "Hugging Face"});
  for (const char* text : {"", "[]", "{", "nonsense"}) {
    folder_.write("config.json", text);
    refuse_folder({"config.json", "JSON"});
  }
  folder_.write("config.json", "{\"a\":" + std::string(100000, '['));
  refuse_folder({"config.json", "nested deeper"});
  folder_.write("config.json", R"({"model_type":"llama","model_type":"llama"})");
  refuse_folder({"config.json", "twice"});
  folder_.write("config.json", std::string((16 << 20) + 1, ' '));
  refuse_folder({"config.json", "16777217 bytes"});
}

TEST_F(HfConfig, ComesBackAsWritten) {
  DecoderOptions config;
  config.dim = 40;
  config.layers = 3;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dim = 6;
  config.hidden = 30;
  config.vocab = 77;
  config.norm_eps = 3e-6;
  config.tied = true;
  config.rope_theta = 12345.5;
  for (const char* scaling : {"none", "linear", "llama3"}) {
    config.rope_scaling = scaling;
    const bool scaled = config.rope_scaling != "none";
    const bool llama3 = config.rope_scaling == "llama3";
    config.rope_factor = scaled ? 4.5 : 1;
    config.rope_low_freq = llama3 ? 1.5 : 1;
    config.rope_high_freq = llama3 ? 5 : 4;
    config.rope_original_positions = llama3 ? 2048 : 8192;
    Config a;
    a.model.type = config;
    const json written = hf_config_json(a.model, 512, "bfloat16");
    EXPECT_EQ(written.at("torch_dtype"), "bfloat16");
    EXPECT_EQ(written.at("max_position_embeddings"), 512);
    Config b;
    b.model.type = read(written);
    EXPECT_EQ(config_to_json(a), config_to_json(b));
  }
}

TEST_F(HfConfig, KeepsOtherKeysOfTheFile) {
  json content = llama_json();
  content.erase("rope_scaling");
  content["rope_parameters"] = kLlama3;
  content["rope_parameters"]["rope_theta"] = 777;
  content["dtype"] = "float16";
  ModelConfig config;
  config.type = read(content);
  config.from = folder_.path("");
  const json written = hf_config_json(config, 512, "float32");
  EXPECT_EQ(written.at("bos_token_id"), 0);
  EXPECT_EQ(written.at("max_position_embeddings"), 8192);  // longer than this run's sequences
  EXPECT_EQ(written.at("rope_theta"), 777);
  EXPECT_EQ(written.at("rope_scaling").at("factor"), 8);
  EXPECT_FALSE(written.contains("rope_parameters"));
  EXPECT_FALSE(written.contains("dtype"));
  EXPECT_EQ(hf_config_json(config, 10000, "float32").at("max_position_embeddings"), 10000);
  std::filesystem::remove(folder_.path("config.json"));  // the original model may be deleted by then
  EXPECT_EQ(hf_config_json(config, 512, "float32").at("rope_theta"), 777);
}

TEST_F(HfConfig, GivesTheConfigurationItsArchitecture) {
  folder_.write("config.json", llama_json().dump());
  const std::vector<std::string> base = {"data.text=*.txt", "data.tokenizer=t.json", "model.from=" + folder_.path("")};
  const auto with = [&](const std::vector<std::string>& more) {
    std::vector<std::string> all = base;
    all.insert(all.end(), more.begin(), more.end());
    return load_config("", all);
  };
  const Config config = with({"model.lora=8", "model.init_std=0.1", "model.freeze=model.embed*", "model.lora_alpha=3"});
  EXPECT_EQ(test::llama_of(config).dim, 576);
  EXPECT_EQ(test::llama_of(config).heads, 9);
  EXPECT_EQ(config.model.lora, 8);
  EXPECT_EQ(test::llama_of(config).init_std, 0.1);
  expect_error([&] { with({"model.dim=64"}); },
               {"model.dim is 64", "model.from", "576", "config.json", "remove model.dim"});
  expect_error([&] { with({"model.type=mlp"}); }, {"model.type is \"mlp\"", "\"llama\""});
  expect_error([&] { with({"model.tied=false"}); }, {"model.tied is false", "true"});
  expect_error([&] { with({"model.layers=4"}); }, {"model.layers is 4", "30"});  // an explicit default
  expect_error([&] { parse_config(R"({"model": {"rope_factor": 2}})", "run.json", base); },
               {"run.json", "model.rope_factor is 2"});
  // A configuration that is printed in full describes the same run.
  EXPECT_EQ(config_to_json(parse_config(config_to_json(config), "again", {})), config_to_json(config));
  std::filesystem::remove(folder_.path("config.json"));
  expect_error([&] { with({}); }, {"config.json", "no such file"});
}

TEST_F(HfConfig, LetsTheUserSetKeysThatDoNotShapeWeights) {
  std::vector<std::string> free;
  for (const ModelType& type : model_types()) {
    for (const Key& key : type.options.keys) {
      if (!comes_with_weights(type, key.name)) free.push_back(type.name + "." + key.name);
    }
  }
  std::vector<std::string> expected;
  for (const DecoderFamily& family : decoder_families()) {
    for (const std::string key : {"balance_rate", "dropout"}) {
      if (has_option(family, key)) expected.push_back(family.name + "." + key);
    }
    for (const char* key : {".attention_dropout", ".init_std"}) expected.push_back(family.name + key);
  }
  for (const char* key :
       {"bert.dropout", "bert.attention_dropout", "bert.init_std", "mamba.init_std", "mlp.init_std"}) {
    expected.emplace_back(key);
  }
  EXPECT_EQ(free, expected);
  EXPECT_FALSE(comes_with_weights(model_type("llama"), "steps"));
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
