// Tests reading and writing the configuration, and every error in it.
#include "twobp/train/config.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <map>
#include <set>
#include <variant>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/model_options.h"
#include "tests/train/helpers.h"
#include "twobp/config/section.h"
#include "twobp/models/captured.h"
#include "twobp/pipeline/step_plan.h"
#include "twobp/schedule/named_schedules.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_error;
using test::TempFolder;

// The configuration is valid, except for what the overrides change.
Config with(std::vector<std::string> overrides) {
  overrides.insert(overrides.begin(), "data.text=*.txt");
  return load_config("", overrides);
}

void refuse(const std::vector<std::string>& overrides, const std::vector<std::string>& parts) {
  SCOPED_TRACE(overrides.empty() ? "" : overrides.front());
  expect_error([&] { with(overrides); }, parts);
}

Config parse(const std::string& json) {
  return parse_config(json, "run.json", {"data.text=*.txt"});
}

void refuse_json(const std::string& json, const std::vector<std::string>& parts) {
  SCOPED_TRACE(json.substr(0, 100));
  auto all = parts;
  all.emplace_back("run.json");
  expect_error([&] { parse(json); }, all);
}

TEST(Config, ReadsEverySectionAndType) {
  const Config config = parse(R"({
    "// note": {"ignored": [1, {"deep": null}]},
    "model": {"dim": 128, "tied": true, "norm_eps": 1, "// why": "a comment"},
    "data": {"shuffle": false, "held_out": 0.25},
    "pipeline": {"stages": 3, "schedule": "gpipe", "split": [1, 2, 1], "timeout": 2.5},
    "optimizer": {"type": "sgd", "lr": 1e-2},
    "train": {"seed": 18446744073709551615, "steps": 5000000000},
    "save": {"model": "out"}
  })");
  EXPECT_EQ(test::llama_of(config).dim, 128);
  EXPECT_TRUE(test::llama_of(config).tied);
  EXPECT_EQ(test::llama_of(config).norm_eps, 1.0);
  EXPECT_EQ(test::llama_of(config).layers, 4);  // the default, since it is not given
  EXPECT_FALSE(config.data.shuffle);
  EXPECT_EQ(config.data.held_out, 0.25);
  EXPECT_EQ(config.pipeline.stages, 3);
  EXPECT_EQ(config.pipeline.schedule, "gpipe");
  EXPECT_EQ(config.pipeline.split, (std::vector<int>{1, 2, 1}));
  EXPECT_EQ(config.pipeline.timeout, 2.5);
  EXPECT_EQ(config.optimizer.type, "sgd");
  EXPECT_EQ(config.optimizer.lr, 0.01);
  EXPECT_EQ(config.train.seed, 18446744073709551615U);
  EXPECT_EQ(config.train.steps, 5000000000);
  EXPECT_EQ(config.save.model, "out");
}

TEST(Config, ReadsAFileAndOverridesInTurn) {
  const TempFolder folder;
  const std::string path = folder.write("run.json", R"({"data": {"text": "a=b.txt"}, "train": {"steps": 7}})");
  EXPECT_EQ(load_config(path, {}).train.steps, 7);
  EXPECT_EQ(load_config(path, {}).data.text, "a=b.txt");
  const Config config = load_config(path, {"train.steps=8", "train.steps=9", "data.text=x=y.txt", "optimizer.lr=1e-3"});
  EXPECT_EQ(config.train.steps, 9);
  EXPECT_EQ(config.data.text, "x=y.txt");
  EXPECT_EQ(config.optimizer.lr, 1e-3);
}

TEST(Config, ReadsOverridesOfEveryType) {
  const Config config = with({"pipeline.split=1,3", "model.tied=true", "train.seed=7", "optimizer.lr=1",
                              "pipeline.schedule=1f1b", "save.model=", "pipeline.memory_cap=0"});
  EXPECT_EQ(config.pipeline.split, (std::vector<int>{1, 3}));
  EXPECT_TRUE(test::llama_of(config).tied);
  EXPECT_EQ(config.train.seed, 7U);
  EXPECT_EQ(config.optimizer.lr, 1.0);
  EXPECT_EQ(config.pipeline.memory_cap, "0");
  EXPECT_EQ(with({"pipeline.split=[2, 2]"}).pipeline.split, (std::vector<int>{2, 2}));
  EXPECT_TRUE(with({"pipeline.split=1,3", "pipeline.split="}).pipeline.split.empty());
  const DataConfig pictures = load_config("", {"model.type=resnet", "data.synthetic=", "data.arrays=folder",
                                               "data.mean=0.5,1,-2e-1", "data.std=[0.25]"})
                                  .data;
  EXPECT_EQ(pictures.mean, (std::vector<double>{0.5, 1, -0.2}));
  EXPECT_EQ(pictures.std, (std::vector<double>{0.25}));
}

TEST(Config, EveryScheduleAndPolicyIsKnown) {
  for (const auto& name : schedule_names()) {
    EXPECT_NO_THROW(with({"pipeline.schedule=" + name})) << name;
  }
  for (const auto& name : policy_names()) EXPECT_NO_THROW(with({"pipeline.p2=" + name})) << name;
}

TEST(Config, JsonRoundTripKeepsEveryKey) {
  const std::string first =
      config_to_json(with({"pipeline.split=1,3", "optimizer.lr=0.1", "train.seed=12345678901234567890",
                           "data.shuffle=false", "model.norm_eps=1e-6"}));
  const Config again = parse_config(first, "again", {});
  EXPECT_EQ(config_to_json(again), first);
  EXPECT_EQ(again.train.seed, 12345678901234567890U);
  EXPECT_EQ(again.optimizer.lr, 0.1);
  EXPECT_EQ(test::llama_of(again).norm_eps, 1e-6);

  const auto json = nlohmann::json::parse(first);
  size_t keys = 0;
  for (const auto& section : json) keys += section.size();
  size_t expected = 0;
  for_each_key(again, [&expected](const std::string&, const Key&, void*) { ++expected; });
  EXPECT_EQ(keys, expected);
}

TEST(Config, ConfigurationsOfTheRepositoryLoad) {
  size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(TWOBP_SOURCE_DIR "/configs")) {
    if (entry.path().extension() != ".json") continue;
    EXPECT_NO_THROW(load_config(entry.path().string(), {})) << entry.path();
    ++files;
  }
  EXPECT_GE(files, 2U);
}

// A path need not be UTF-8, but JSON must be.
TEST(Config, PrintsPathsThatAreNotUtf8) {
  EXPECT_TRUE(nlohmann::json::accept(config_to_json(with({"save.model=a\xff"}))));
}

// The compiler cannot check the lists of keys against the structs, so the test counts bytes. A member that is
// added to a struct but not to its list changes a size here.
struct KeySizes {
  size_t bytes = 0;
  size_t narrow = 0;  // fields that leave less than 8 bytes of padding

  void add(const Field& field) {
    const size_t size = std::visit(
        [](auto* value) {
          using Value = std::remove_pointer_t<decltype(value)>;
          return std::is_same_v<Value, Choice> ? sizeof(ModelOptions) : sizeof(*value);
        },
        field);
    bytes += size;
    narrow += size < 8 ? 1 : 0;
  }
  void expect(size_t size, const std::string& what) const {
    EXPECT_LE(bytes, size) << what;
    EXPECT_LE(size, bytes + 8 * narrow) << what;
  }
};

TEST(Config, EveryMemberIsAKey) {
  const std::map<std::string, size_t> options = {{"bert", sizeof(BertOptions)},
                                                 {"mamba", sizeof(MambaOptions)},
                                                 {"resnet", sizeof(ResnetOptions)},
                                                 {"mlp", sizeof(MlpOptions)},
                                                 {"captured", sizeof(CapturedOptions::program)}};
  for (const std::string& type : model_type_names()) {
    Config config;
    config.model.type = ModelOptions(type);
    std::map<std::string, KeySizes> sections;
    std::set<std::string> names;
    std::set<const void*> places;
    size_t keys = 0;
    for_each_key(config, [&](const std::string& name, const Key& key, void* values) {
      ++keys;
      names.insert(name);
      sections[name.substr(0, name.find('.'))].add(key.field(values));
      std::visit([&](auto* field) { places.insert(field); }, key.field(values));
      EXPECT_FALSE(key.meaning.empty()) << name;
    });
    EXPECT_EQ(names.size(), keys);
    EXPECT_EQ(places.size(), keys);
    std::map<std::string, size_t> structs = {{"data", sizeof(DataConfig)},
                                             {"pipeline", sizeof(PipelineConfig)},
                                             {"optimizer", sizeof(OptimizerConfig)},
                                             {"train", sizeof(TrainConfig)},
                                             {"save", sizeof(SaveConfig)}};
    ASSERT_EQ(sections.size(), structs.size() + 1);
    if (options.contains(type)) structs["model"] = sizeof(ModelConfig) + options.at(type);
    for (const auto& [section, size] : structs) sections.at(section).expect(size, section);
  }
}

// Each family of decoders has some of the keys, and each key belongs to a family.
TEST(Config, EveryOptionOfADecoderIsAKeyOfAFamily) {
  KeySizes sizes;
  DecoderOptions options;
  for (const Key& key : decoder_keys()) {
    sizes.add(key.field(&options));
    const auto& all = decoder_families();
    EXPECT_TRUE(std::any_of(all.begin(), all.end(), [&](const auto& family) { return has_option(family, key.name); }))
        << key.name;
  }
  sizes.expect(sizeof(DecoderOptions), "DecoderOptions");
}

// Each error names the file once, whatever the name of the file is.
TEST(ConfigErrors, NameTheFileOnce) {
  for (const char* const origin : {"run.json", "model"}) {
    const std::string start = concat(origin, ": ");
    const auto message = [&](const std::string& json) -> std::string {
      try {
        parse_config(json, origin, {"data.text=*.txt"});
      } catch (const Error& error) {
        return error.what();
      }
      return "";
    };
    for (const char* const json :
         {R"({"model": {"dim": 0}})", R"({"model": {"dim": "x"}})", R"({"model": {"type": "lama"}})",
          R"({"model": {"dim": 100, "heads": 3}})", R"({"model": {"state": 3}})"}) {
      const std::string text = message(json);
      EXPECT_EQ(text.rfind(start), 0U) << text;
    }
  }
}

// A key of another model type means nothing here. The error names it.
TEST(Config, RefusesKeysOfOtherModelTypes) {
  refuse({"model.state=8"}, {"model.state", "mamba", "model.type is llama", "remove it"});
  refuse({"model.type=mamba", "model.heads=2"}, {"model.heads", "llama, ", ", bert", "model.type is mamba"});
  EXPECT_NO_THROW(with({"model.state=8", "model.type=mamba"}));  // the order of the keys does not matter
  expect_error([] { parse_config(R"({"model": {"type": "llama", "depths": [1]}})", "run.json", {}); },
               {"run.json", "model.depths", "resnet"});
}

TEST(Config, ReferenceHasALinePerKey) {
  const std::string text = config_reference();
  for_each_key(Config{}, [&text](const std::string& name, const Key&, void*) {
    EXPECT_NE(text.find(name + " "), std::string::npos) << name;
  });
  EXPECT_NE(text.find("mamba: size of the state of each channel of the scan"), std::string::npos);
  EXPECT_NE(text.find("decoders, bert, mamba, mlp: width of the model"), std::string::npos);
  EXPECT_NE(text.find("pipeline.p2_batching"), std::string::npos);
  EXPECT_NE(text.find("one of loop, concat"), std::string::npos);
  EXPECT_NE(text.find("from 0 to below 1"), std::string::npos);
  EXPECT_NE(text.find("\"cosine\""), std::string::npos);
}

TEST(ConfigErrors, RefuseFilesThatCannotBeRead) {
  const TempFolder folder;
  expect_error([&] { load_config(folder.path("none.json"), {}); }, {"none.json", "No such file"});
  expect_error([&] { load_config(folder.path(""), {}); }, {"is a folder"});
  expect_error([&] { load_config(folder.write("a.json", ""), {}); }, {"a.json", "empty"});
  expect_error([&] { load_config(folder.write("a.json", " \n"), {}); }, {"a.json", "empty"});
  expect_error([&] { load_config(folder.write("a.json", std::string((16 << 20) + 1, ' ')), {}); },
               {"longer than the 16777216 bytes"});
}

TEST(ConfigErrors, SayWhereTheJsonIsWrong) {
  refuse_json("{\n  \"model\": {\n    \"dim\": 12,,\n  }\n}", {"not JSON", "line 3, column 15"});
  refuse_json("{\"model\": {\"dim\": 1", {"line 1", "unexpected end of input"});
  refuse_json("{\"train\": {\"seed\": 1e999}}", {"not JSON", "1e999"});
  refuse_json("{\"save\": {\"model\": \"\xff\"}}", {"line 1", "UTF-8"});
  refuse_json("{} {}", {"line 1, column 4"});
  refuse_json("[1]", {"expected an object", "a list of 1"});
  refuse_json("7", {"expected an object", "integer 7"});
}

// Deep nesting must not overflow the stack.
TEST(ConfigErrors, RefuseDeepNesting) {
  const size_t depth = 200000;
  const std::string deep = std::string(depth, '[') + std::string(depth, ']');
  refuse_json("{\"model\": {\"dim\": " + deep + "}}", {"model.dim", "an integer", "a list of 1"});
  EXPECT_NO_THROW(parse("{\"// deep\": " + deep + "}"));
}

TEST(ConfigErrors, RefuseUnknownNames) {
  // An earlier version had this key. Checkpoints have it as an empty list.
  EXPECT_TRUE(parse(R"({"optimizer": {"weight_decay_of": []}})").optimizer.groups.empty());
  refuse_json(R"({"optimizer": {"weight_decay_of": ["*.bias=0.1"]}})",
              {"optimizer.weight_decay_of", "PATTERN weight_decay=DECAY", "optimizer.groups"});
  refuse({"optimizer.weight_decay_of=*.bias=0.1"}, {"--set", "optimizer.groups"});
  refuse_json(R"({"pipelin": {}})", {"unknown section \"pipelin\"", "did you mean \"pipeline\""});
  refuse_json(R"({"pipeline": {"micro_batchs": 2}})", {"\"pipeline.micro_batchs\"", "\"pipeline.micro_batches\""});
  refuse_json(R"({"model": {"lr": 2}})", {"\"model.lr\"", "\"optimizer.lr\""});
  refuse_json(R"({"dim": 2})", {"unknown section \"dim\"", "\"model.dim\""});
  refuse_json(R"({"model": 3})", {"\"model\" expects a section", "integer 3"});
  refuse_json(R"({"model": {"dim": 8, "dim": 16}})", {"\"dim\" is given twice"});
  refuse({"train.step=3"}, {"--set train.step=3", "\"train.steps\""});
  refuse({"steps=3"}, {"--set steps=3", "\"train.steps\""});
  refuse({"train=3"}, {"--set train=3", "section.key=value", "clip_norm"});
  refuse({"train.steps"}, {"--set train.steps", "section.key=value"});
  refuse({"=3"}, {"--set =3"});
  refuse({".=3"}, {"--set .=3", "unknown section \"\""});
}

TEST(ConfigErrors, RefuseWrongTypes) {
  refuse_json(R"({"model": {"dim": "big"}})", {"\"model.dim\" expects an integer", "got text \"big\""});
  refuse_json(R"({"model": {"dim": 1.5}})", {"an integer", "number 1.5"});
  refuse_json(R"({"model": {"dim": null}})", {"an integer", "null"});
  refuse_json(R"({"model": {"dim": 9223372036854775808}})", {"to 9223372036854775807", "integer 9223372036854775808"});
  refuse_json(R"({"model": {"tied": 1}})", {"a boolean", "integer 1"});
  refuse_json(R"({"model": {"type": true}})", {"expects text", "boolean true"});
  refuse_json(R"({"pipeline": {"stages": 2147483648}})", {"to 2147483647", "2147483648"});
  refuse_json(R"({"pipeline": {"split": 4}})", {"a list of integers", "integer 4"});
  refuse_json(R"({"pipeline": {"split": [1, "2"]}})", {"a list of integers", "text \"2\" as item 2"});
  refuse_json(R"({"pipeline": {"schedule": 1}})", {"expects text", "between quotes"});
  refuse_json(R"({"train": {"seed": -1}})", {"from 0 to 18446744073709551615", "integer -1"});
  refuse_json(R"({"optimizer": {"lr": "1e-3"}})", {"a number", "text \"1e-3\""});
  refuse_json(R"({"save": {"model": {}}})", {"expects text", "a section"});
  refuse({"train.steps=many"}, {"--set train.steps=many", "an integer", "text \"many\""});
  refuse({"train.steps="}, {"an integer", "text \"\""});
  refuse({"train.steps=1 2"}, {"an integer"});
  refuse({"data.shuffle=yes"}, {"a boolean", "text \"yes\""});
  refuse({"pipeline.split=1,x"}, {"a list of integers"});
  refuse({"pipeline.split=[1,9223372036854775807]"},
         {"pipeline.split", "integers from -2147483648 to 2147483647", "integer 9223372036854775807 as item 2"});
  refuse({"optimizer.lr=nan"}, {"a number", "text \"nan\""});
  refuse({"data.mean=1,x"}, {"a list of numbers"});
  refuse_json(R"({"data": {"std": 1}})", {"a list of numbers", "integer 1"});
}

TEST(ConfigErrors, RefuseNumbersOutOfRange) {
  // Every bounded number refuses a value just outside each bound.
  for (const char* text : {"model.dim=0",
                           "model.dim=1048577",
                           "model.layers=0",
                           "model.heads=0",
                           "model.heads=-1",
                           "model.kv_heads=-1",
                           "model.head_dim=-2",
                           "model.hidden=-1",
                           "model.vocab=0",
                           "model.norm_eps=0",
                           "model.rope_theta=0",
                           "model.rope_factor=0",
                           "model.rope_original_positions=0",
                           "model.init_std=-0.1",
                           "data.sequence=0",
                           "data.held_out=1",
                           "data.held_out=-0.1",
                           "data.workers=0",
                           "data.mask_probability=0",
                           "data.mask_probability=1.5",
                           "data.image_size=-1",
                           "data.padding=-1",
                           "pipeline.stages=-1",
                           "pipeline.ranks=-1",
                           "pipeline.micro_batches=-1",
                           "pipeline.micro_batch_size=0",
                           "pipeline.threads=0",
                           "pipeline.timeout=0",
                           "optimizer.lr=0",
                           "optimizer.weight_decay=-1",
                           "optimizer.beta1=1",
                           "optimizer.beta1=-0.1",
                           "optimizer.beta2=1",
                           "optimizer.eps=0",
                           "optimizer.momentum=1",
                           "optimizer.warmup=-1",
                           "optimizer.min_lr=-1",
                           "train.steps=0",
                           "train.clip_norm=-1",
                           "train.eval_every=-1",
                           "train.eval_batches=-1",
                           "train.log_every=0"}) {
    const std::string name = std::string(text).substr(0, std::string(text).find('='));
    refuse({text}, {name + " is ", "must be"});
  }
  refuse({"data.held_out=1"}, {"from 0 to below 1"});
  refuse({"pipeline.stages=-1"}, {"an integer from 0 to 65536"});
  EXPECT_NO_THROW(with({"data.held_out=0"}));

  Config config = with({});
  config.optimizer.lr = std::numeric_limits<double>::quiet_NaN();
  expect_error([&] { check_config(config); }, {"optimizer.lr is nan"});
  config.optimizer.lr = std::numeric_limits<double>::infinity();
  expect_error([&] { check_config(config); }, {"optimizer.lr is inf"});
}

TEST(ConfigErrors, RefuseUnknownChoices) {
  refuse({"model.type=lama"}, {"model.type is \"lama\"", "\"llama\""});
  refuse({"pipeline.schedule=1f1"}, {"pipeline.schedule", "\"1f1b\""});
  refuse({"pipeline.schedule="}, {"pipeline.schedule is \"\""});
  refuse({"pipeline.p2=fil"}, {"pipeline.p2", "\"fill\"", "cooldown"});
  refuse({"pipeline.p2_batching=concatenate"}, {"pipeline.p2_batching", "concat"});
  refuse({"optimizer.type=adamW"}, {"optimizer.type", "\"adamw\""});
  refuse({"optimizer.schedule=cos"}, {"optimizer.schedule", "\"cosine\""});
  refuse({"data.synthetic=token"}, {"data.synthetic", "\"tokens\""});
  refuse({"data.crop=resize"}, {"data.crop", "\"resized\""});
}

TEST(ConfigErrors, RefuseContradictionsInTheModel) {
  refuse({"model.dim=100", "model.heads=3"}, {"model.dim (100)", "not divisible by model.heads (3)"});
  EXPECT_NO_THROW(with({"model.dim=100", "model.heads=3", "model.head_dim=32"}));
  refuse({"model.heads=4", "model.kv_heads=3"}, {"model.kv_heads (3)", "does not divide model.heads (4)"});
  EXPECT_NO_THROW(with({"model.heads=4", "model.kv_heads=2"}));
  refuse({"model.dim=12", "model.heads=4"}, {"model.dim / model.heads (3)", "odd"});
  refuse({"model.head_dim=63"}, {"model.head_dim (63)", "odd"});
  refuse({"model.type=gpt_neox", "model.dim=40", "model.rope_part=0.3"}, {"model.rope_part (0.3) turns 3 of the 10"});
  refuse({"model.type=gpt2", "model.activation=silu"}, {"model.activation is \"silu\"", "\"gpt2\"", "no gate"});
  refuse({"model.type=mistral", "model.windows=4,-1"}, {"model.windows has -1"});
  refuse({"model.windows=4"}, {"\"model.windows\" is a key of model.type mistral", "model.type is llama"});
  refuse({"model.type=smollm3", "model.rope_layers=1,2"}, {"model.rope_layers has 2"});
  EXPECT_NO_THROW(load_config("", {"model.type=mlp", "data.synthetic=vectors", "model.dim=12"}));
  const auto refuse_in = [](const std::string& type, const std::vector<std::string>& settings,
                            const std::vector<std::string>& parts) {
    std::vector<std::string> all = {"model.type=" + type,
                                    concat("data.synthetic=", type == "resnet" ? "images" : "tokens")};
    all.insert(all.end(), settings.begin(), settings.end());
    test::expect_error([&] { load_config("", all); }, parts);
  };
  refuse_in("bert", {"model.positions=128", "data.sequence=129"}, {"data.sequence (129)", "128 positions"});
  refuse_in("bert", {"model.heads=3"}, {"model.dim (256) is not divisible by model.heads (3)"});
  refuse_in("bert", {"model.kv_heads=2"}, {"model.kv_heads", "model.type is bert"});
  refuse_in("bert", {"model.head_dim=32"}, {"model.head_dim", "model.type is bert"});
  refuse_in("bert", {"model.dropout=1"}, {"model.dropout"});
  refuse_in("bert", {"model.attention_dropout=-0.5"}, {"model.attention_dropout"});
  refuse_in("bert", {"model.activation=\"relu\""}, {"model.activation", "gelu_tanh"});
  refuse_in("resnet", {"model.widths=[64,128]"}, {"model.widths has 2", "model.depths 4"});
  refuse_in("resnet", {"model.depths=[]"}, {"model.depths"});
  refuse_in("resnet", {"model.depths=[1,0,1,1]"}, {"model.depths", "0 blocks"});
  refuse_in("resnet", {"model.widths=[6,8,8,8]"}, {"model.widths", "6", "multiple of 4"});
}

TEST(ConfigErrors, RefuseAdaptersThatPeftWouldNotUse) {
  const auto saved = [](const std::string& target) {
    Config config = load_config(
        "", {"model.type=deepseek_v3", "model.lora=2", "model.lora_targets=" + target, "data.synthetic=tokens"});
    config.model.from = "where it came from";
    config.save.lora = "adapter";
    check_config(config);
  };
  test::expect_error([&] { saved("o_proj,shared_experts.down_proj"); }, {"shared_experts.down_proj", "PEFT", "merged"});
  test::expect_error([&] { saved("0.mlp.up_proj"); }, {"0.mlp.up_proj", "PEFT", "merged"});
  EXPECT_NO_THROW(saved("o_proj,mlp.experts.down_proj,experts.gate_up_proj"));
}

TEST(ConfigErrors, RefuseBadRopeScaling) {
  EXPECT_NO_THROW(with({"model.rope_scaling=llama3", "model.rope_factor=8"}));
  refuse({"model.rope_low_freq=4"}, {"model.rope_low_freq is 4", "only model.rope_scaling \"llama3\" uses it"});
  refuse({"model.rope_scaling=llama3", "model.rope_low_freq=4"}, {"rope_low_freq (4)", "rope_high_freq (4)"});
  EXPECT_NO_THROW(with({"model.rope_scaling=yarn", "model.rope_factor=8", "model.rope_beta_fast=16"}));
  refuse({"model.rope_scaling=yarn", "model.rope_beta_fast=0.5"}, {"rope_beta_slow (1)", "rope_beta_fast (0.5)"});
  refuse({"model.rope_scaling=linear", "model.rope_beta_fast=8"}, {"model.rope_beta_fast is 8", "\"yarn\""});
  refuse({"model.rope_scaling=longrope"}, {"\"longrope\"", "a llama has none or linear, llama3, yarn, dynamic"});
  const std::string longrope = "model.rope_scaling=longrope";
  refuse({"model.type=phi3", longrope}, {"model.rope_short has 0 factors", "32 pairs"});
  const std::string ones = "[1,1,1,1,1,1,1,1]";
  refuse({"model.type=phi3", "model.head_dim=16", longrope, "model.rope_short=" + ones,
          "model.rope_long=[1,1,1,1,1,1,1,0]"},
         {"model.rope_long has 0, not a number above 0"});
  refuse({"model.type=phi3", "model.rope_short=" + ones}, {"model.rope_short", "\"longrope\""});
}

TEST(ConfigErrors, RefuseContradictionsInPipelineAndTraining) {
  refuse({"pipeline.split=1,1,2"}, {"lists 3 stages", "pipeline.stages is 2"});
  refuse({"pipeline.split=4,0"}, {"stage 1 0 layers", "from 1"});
  refuse({"pipeline.split=2147483647,2147483647,8", "pipeline.ranks=3"}, {"stage 0 2147483647 layers"});
  refuse({"pipeline.ranks=40000"}, {"10 layers", "40000 stages", "pipeline.ranks"});
  for (const char* key : {"optimizer.warmup", "train.steps", "train.eval_every", "train.eval_batches",
                          "train.log_every", "save.every", "save.keep"}) {
    refuse({std::string(key) + "=9223372036854775807"}, {key, "to 1000000000000"});
  }
  refuse({"pipeline.recompute=both,x.*=all"}, {"pipeline.recompute: ", "'all'"});
  refuse({"pipeline.recompute=stage:0=both"}, {"pipeline.recompute: ", "needs pipeline.split"});
  refuse({"pipeline.recompute=[1]"}, {"pipeline.recompute", "list of texts"});
  refuse({"optimizer.min_lr=0.1", "optimizer.lr=0.01"}, {"optimizer.min_lr (0.1)", "above optimizer.lr (0.01)"});
  refuse({"optimizer.min_lr=1e-5", "optimizer.schedule=constant"}, {"optimizer.min_lr is 1e-05", "cosine"});
  refuse({"save.dtype=bfloat16"}, {"save.dtype is bfloat16", "save.model"});
  refuse({"pipeline.schedule=auto", "pipeline.p2=off"}, {"pipeline.p2 is off", "named or written schedule", "auto"});
  refuse({"train.loss_scale=8"}, {"train.loss_scale is 8", "train.precision \"fp16\""});
  refuse({"model.rope_factor=2"}, {"model.rope_factor is 2", "only a model.rope_scaling uses it", "set it to 1"});
  refuse({"model.rope_scaling=linear", "model.rope_low_freq=2"}, {"model.rope_low_freq is 2", "llama3"});
  refuse({"optimizer.min_lr=1e-5", "optimizer.schedule=inverse_sqrt"}, {"optimizer.min_lr is 1e-05", "wsd"});
  refuse({"optimizer.decay=5"}, {"optimizer.decay is 5", "wsd"});
  refuse({"optimizer.muon_momentum=0.9"}, {"optimizer.muon_momentum is 0.9", "\"muon\""});
  refuse({"optimizer.momentum=0.9"}, {"optimizer.momentum is 0.9", "sgd", "set it to 0"});
  for (const char* key : {"beta1", "beta2", "eps"}) {
    refuse({"optimizer.type=sgd", concat("optimizer.", key, "=0.5")}, {concat("optimizer.", key, " is 0.5"), "adamw"});
  }
  refuse({"model.lora_alpha=8"}, {"model.lora_alpha", "model.lora is 0"});
  refuse({"model.lora_targets=q_proj"}, {"model.lora_targets", "model.lora is 0"});
  refuse({"train.eval_every=10", "data.held_out=0"}, {"train.eval_every is 10", "data.held_out is 0"});
  refuse({"pipeline.gradients=stream"}, {"pipeline.gradients", "\"streamed\""});
  refuse({"pipeline.gradients=streamed", "train.clip_norm=1"}, {"every stage keeps its gradients", "train.clip_norm"});
  refuse({"pipeline.stash=fp16"}, {"pipeline.stash", "\"bf16\""});
  refuse({"pipeline.stash=bf16", "pipeline.recompute=both"}, {"pipeline.stash", "pipeline.recompute"});
  refuse({"pipeline.gradients=streamed", "train.precision=fp16"}, {"every stage keeps its gradients", "fp16"});
  refuse({"pipeline.gradients=streamed", "pipeline.device=cuda", "pipeline.graphs=true"},
         {"every stage keeps its gradients", "pipeline.graphs"});
  refuse({"pipeline.memory_cap=lots"}, {"pipeline.memory_cap", "\"lots\"", "512MiB"});
}

TEST(ConfigErrors, NameTheFileOfAContradiction) {
  refuse_json(R"({"model": {"dim": 100, "heads": 3}})", {"run.json: model.dim (100)"});
}

TEST(MemoryCap, ReadsSizes) {
  EXPECT_EQ(parse_memory_cap("auto"), MemoryCap::automatic());
  EXPECT_EQ(parse_memory_cap("1x"), MemoryCap::automatic());
  EXPECT_EQ(parse_memory_cap("1.05x"), MemoryCap::automatic(1.05));
  EXPECT_EQ(parse_memory_cap("0"), 0);
  EXPECT_EQ(parse_memory_cap("0MiB"), 0);
  EXPECT_EQ(parse_memory_cap("1000000"), 1000000);
  EXPECT_EQ(parse_memory_cap("512MiB"), int64_t{512} << 20);
  EXPECT_EQ(parse_memory_cap("2 GiB"), int64_t{2} << 30);
  EXPECT_EQ(parse_memory_cap("1.5KiB"), 1536);
  EXPECT_EQ(parse_memory_cap("3B"), 3);
  EXPECT_EQ(parse_memory_cap("2GB"), 2000000000);
  EXPECT_EQ(parse_memory_cap("1TiB"), int64_t{1} << 40);
  for (const char* text :
       {"",           "-1",   "MiB", "12XiB", "1e9", "inf", "nan",  "0.5",    "1MiBs", "1 2",   "99999999999999999999",
        "9000000TiB", "Auto", " 1",  "0x10",  "0x",  "x",   "0.9x", "1.05 x", "1.05X", "2000x", "nanx",
        "infx",       "1e1x"}) {
    SCOPED_TRACE(text);
    expect_error([&] { parse_memory_cap(text); }, {"pipeline.memory_cap is \"" + std::string(text) + "\""});
  }
  EXPECT_EQ(parse(R"({"pipeline": {"memory_cap": 0}})").pipeline.memory_cap, "0");
  EXPECT_EQ(parse(R"({"pipeline": {"memory_cap": "1GiB"}})").pipeline.memory_cap, "1GiB");
  refuse_json(R"({"pipeline": {"memory_cap": -5}})", {"pipeline.memory_cap", "integer -5"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
