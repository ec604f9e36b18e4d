// Tests the saved model as Hugging Face reads it: a safetensors header, and the weights under their names with packed
// weights unpacked. A failure leaves the previous files.
#include "twobp/train/weights/save_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/train/helpers.h"
#include "tests/train/training.h"
#include "twobp/models/model_weights.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/train/weights/weight_files.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;
using test::read_file;
using test::TempFolder;
using test::tiny_config;

struct SafeTensors {
  json header;
  std::string data;

  explicit SafeTensors(const std::string& path) {
    const std::string content = read_file(path);
    uint64_t length = 0;
    if (content.size() < sizeof(length)) throw std::runtime_error("no header in " + path);
    std::memcpy(&length, content.data(), sizeof(length));
    header = json::parse(content.substr(sizeof(length), length));
    data = content.substr(sizeof(length) + length);
    header_bytes = length;
  }
  uint64_t header_bytes = 0;
};

std::vector<std::string> files_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

void expect_saved(bool tied, int stages) {
  SCOPED_TRACE(concat(tied ? "tied" : "untied", ", stages ", stages));
  Config config = tiny_config();
  test::llama_of(config).tied = tied;
  config.pipeline.stages = stages;
  Trainer trainer(config);
  trainer.step();
  const TempFolder folder;
  const std::string target = folder.path("model");
  save_model(target, config.model, config.data.sequence, trainer.weights());
  EXPECT_EQ(files_in(target), (std::vector<std::string>{"config.json", "model.safetensors"}));

  const SafeTensors saved(target + "/model.safetensors");
  EXPECT_EQ(saved.header_bytes % 8, 0U);
  std::set<std::string> expected = {"model.embed_tokens.weight", "model.norm.weight"};
  if (!tied) expected.insert("lm_head.weight");
  for (int i = 0; i < 3; ++i) {
    for (const char* name : {"input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
                             "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}) {
      expected.insert(concat("model.layers.", i, ".", name, ".weight"));
    }
  }
  std::set<std::string> names;
  int64_t bytes = 0;
  for (const auto& [name, entry] : saved.header.items()) {
    if (name == "__metadata__") continue;
    names.insert(name);
    EXPECT_EQ(entry.at("dtype"), "F32");
    bytes += entry.at("data_offsets")[1].get<int64_t>() - entry.at("data_offsets")[0].get<int64_t>();
  }
  EXPECT_EQ(names, expected);
  EXPECT_EQ(bytes, static_cast<int64_t>(saved.data.size())) << "no gaps, no overlap, nothing behind";

  // q has 4 heads of 8, k and v have 2.
  const auto shape = [&](const std::string& name) {
    return saved.header.at("model.layers.1." + name + ".weight").at("shape").get<std::vector<int64_t>>();
  };
  EXPECT_EQ(shape("self_attn.q_proj"), (std::vector<int64_t>{32, 32}));
  EXPECT_EQ(shape("self_attn.k_proj"), (std::vector<int64_t>{16, 32}));
  EXPECT_EQ(shape("self_attn.v_proj"), (std::vector<int64_t>{16, 32}));
  EXPECT_EQ(shape("mlp.gate_proj"), (std::vector<int64_t>{48, 32}));
  EXPECT_EQ(shape("mlp.down_proj"), (std::vector<int64_t>{32, 48}));
  EXPECT_EQ(shape("input_layernorm"), (std::vector<int64_t>{32}));

  for (const Parameter* weight : trainer.weights()) {
    const char* value = static_cast<const char*>(weight->value.const_data_ptr());
    for (const ParameterPart& part : weight->parts()) {
      const auto offsets = saved.header.at(part.name).at("data_offsets").get<std::vector<size_t>>();
      const size_t size = offsets[1] - offsets[0];
      ASSERT_LE(offsets[1], saved.data.size());
      EXPECT_EQ(size, static_cast<size_t>(part.rows) * weight->value.nbytes() / weight->sizes()[0]) << part.name;
      EXPECT_EQ(std::memcmp(saved.data.data() + offsets[0], value, size), 0) << part.name;
      value += size;
    }
  }

  const json description = json::parse(read_file(target + "/config.json"));
  EXPECT_EQ(description.at("architectures"), json::array({"LlamaForCausalLM"}));
  EXPECT_EQ(description.at("model_type"), "llama");
  EXPECT_EQ(description.at("hidden_size"), 32);
  EXPECT_EQ(description.at("intermediate_size"), 48);
  EXPECT_EQ(description.at("num_hidden_layers"), 3);
  EXPECT_EQ(description.at("num_attention_heads"), 4);
  EXPECT_EQ(description.at("num_key_value_heads"), 2);
  EXPECT_EQ(description.at("head_dim"), 8);
  EXPECT_EQ(description.at("vocab_size"), test::kVocab);
  EXPECT_EQ(description.at("tie_word_embeddings"), tied);
}

TEST(SaveModelFormat, HasEveryWeightUnderItsName) {
  for (const bool tied : {false, true}) {
    for (const int stages : {1, 3}) expect_saved(tied, stages);
  }
}

class SaveModel : public ::testing::Test {
 protected:
  SaveModel() : config_(tiny_config()), trainer_(config_) {}
  void save(const std::string& to, const SaveModelOptions& options = {}) {
    save_model(to, config_.model, config_.data.sequence, trainer_.weights(), options);
  }

  Config config_;
  Trainer trainer_;
  TempFolder folder_;
};

TEST_F(SaveModel, ReportsAFileInThePlaceOfTheFolder) {
  const std::string file = folder_.write("model", "mine");
  test::expect_error([&] { save(file); }, {file});
  test::expect_error([&] { save(file + "/deeper"); }, {file + "/deeper"});
  EXPECT_EQ(read_file(file), "mine");
  EXPECT_EQ(files_in(folder_.path("")), std::vector<std::string>{"model"});
}

// A folder is in the place of the weights' file. It cannot be replaced, and no other file is left beside it.
TEST_F(SaveModel, ReportsAFolderInThePlaceOfTheFile) {
  const std::string model = folder_.path("model");
  std::filesystem::create_directories(model + "/model.safetensors/mine");
  test::expect_error([&] { save(model); }, {"model.safetensors"});
  EXPECT_EQ(files_in(model), std::vector<std::string>{"model.safetensors"});
  EXPECT_TRUE(std::filesystem::is_directory(model + "/model.safetensors/mine"));
}

// The second file fails after the first is written. The old pair stays as it was.
TEST_F(SaveModel, KeepsTheOldPairIfTheDescriptionFails) {
  const std::string model = folder_.path("model");
  std::filesystem::create_directories(model + "/config.json.new/mine");
  folder_.write("model/model.safetensors", "old weights");
  test::expect_error([&] { save(model); }, {"config.json"});
  EXPECT_EQ(read_file(model + "/model.safetensors"), "old weights");
  EXPECT_EQ(files_in(model), (std::vector<std::string>{"config.json.new", "model.safetensors"}));
}

// /dev/full acts as a full disk. The temporary files are written to it.
TEST_F(SaveModel, KeepsTheOldFilesOnAFullDisk) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full here";
  const std::string model = folder_.path("model");
  std::filesystem::create_directories(model);
  folder_.write("model/model.safetensors", "old weights");
  folder_.write("model/config.json", "old config");
  std::filesystem::create_symlink("/dev/full", model + "/model.safetensors.new");
  test::expect_error([&] { save(model); }, {"model.safetensors.new", "No space left on device"});
  EXPECT_EQ(read_file(model + "/model.safetensors"), "old weights");
  EXPECT_EQ(read_file(model + "/config.json"), "old config");
  EXPECT_EQ(files_in(model), (std::vector<std::string>{"config.json", "model.safetensors"}));
}

TEST_F(SaveModel, OnlyLlamaCanBeSaved) {
  ModelConfig mlp = config_.model;
  mlp.type = MlpOptions{};
  test::expect_error([&] { save_model(folder_.path("model"), mlp, 16, trainer_.weights()); }, {"llama", "mlp"});
  EXPECT_FALSE(std::filesystem::exists(folder_.path("model")));
}

// A later file fails after the weights are written to a temporary file. The old weights stay, too.
TEST_F(SaveModel, KeepsTheOldFilesIfTheSecondShardFails) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full here";
  const std::string model = folder_.path("model");
  std::filesystem::create_directories(model);
  folder_.write("model/model.safetensors", "old weights");
  folder_.write("model/config.json", "old config");
  for (const std::string name : {"model.safetensors.index.json", "config.json"}) {
    std::filesystem::create_symlink("/dev/full", model + "/" + name + ".new");
    test::expect_error([&] { save(model, {.max_shard_bytes = 20000}); }, {name + ".new", "No space left on device"});
    EXPECT_EQ(read_file(model + "/model.safetensors"), "old weights");
    EXPECT_EQ(read_file(model + "/config.json"), "old config");
    EXPECT_EQ(files_in(model), (std::vector<std::string>{"config.json", "model.safetensors"}));
  }
}

TEST_F(SaveModel, ReportsAFolderInThePlaceOfTheDescription) {
  const std::string model = folder_.path("model");
  std::filesystem::create_directories(model + "/config.json");
  folder_.write("model/model.safetensors", "old weights");
  test::expect_error([&] { save(model); }, {"config.json", "a folder"});
  EXPECT_EQ(read_file(model + "/model.safetensors"), "old weights");
  EXPECT_EQ(files_in(model), (std::vector<std::string>{"config.json", "model.safetensors"}));
}

// An error of save_model is reported before training.
TEST_F(SaveModel, IsCheckedBeforeTraining) {
  const std::string model = folder_.path("deep/model");
  SaveConfig save;
  const auto check = [&](const std::string& to) {
    save.model = to;
    check_save(save, config_.model);
  };
  check(model);
  EXPECT_FALSE(std::filesystem::exists(folder_.path("deep"))) << "a run that fails leaves no folder";
  std::filesystem::create_directories(model);
  folder_.write("deep/model/model.safetensors", "old weights");
  check(model);
  EXPECT_EQ(read_file(model + "/model.safetensors"), "old weights");
  EXPECT_EQ(files_in(model), std::vector<std::string>{"model.safetensors"});
  const std::string file = folder_.write("file", "mine");
  test::expect_error([&] { check(file); }, {file});
  test::expect_error([&] { check(file + "/deeper/still"); }, {file, "is a file"});
  std::filesystem::create_directories(folder_.path("blocked/model.safetensors"));
  test::expect_error([&] { check(folder_.path("blocked")); }, {"blocked", "a folder"});
  DecoderOptions refused = test::llama_of(config_);
  refused.head_dim = 8;
  refused.dim = 33;
  config_.model.type = refused;
  test::expect_error([&] { check(model); }, {"transformers", "model.dim (33)"});
  config_.model.type = MlpOptions{};
  test::expect_error([&] { check(model); }, {"llama", "mlp"});
}

// Readers of the folder would use the tokenizer and the settings of the model that was there before.
TEST_F(SaveModel, RefusesAFolderWithTheFilesOfAnotherModel) {
  const std::string model = folder_.path("model");
  std::filesystem::create_directories(model);
  SaveConfig to;
  to.model = model;
  EXPECT_NO_THROW(check_save(to, config_.model, ""));
  folder_.write("model/generation_config.json", "{}");
  test::expect_error([&] { check_save(to, config_.model); }, {model, "generation_config.json", "save.model"});
  std::filesystem::create_directories(folder_.path("from"));
  folder_.write("from/generation_config.json", "{}");
  config_.model.from = folder_.path("from");
  EXPECT_NO_THROW(check_save(to, config_.model, ""));
  folder_.write("model/tokenizer.json", "{}");
  folder_.write("model/chat_template.jinja", "");
  EXPECT_NO_THROW(check_save(to, config_.model)) << "of arrays: it may be theirs";
  test::expect_error([&] { check_save(to, config_.model, ""); },
                     {model, "holds tokenizer.json, chat_template.jinja of another model", "remove them"});
  const std::string tokenizer = folder_.write("mine.json", "{}");
  test::expect_error([&] { check_save(to, config_.model, tokenizer); }, {"holds chat_template.jinja of"});
  folder_.write("chat_template.jinja", "");
  EXPECT_NO_THROW(check_save(to, config_.model, tokenizer));
  std::filesystem::create_directories(folder_.path("model/additional_chat_templates"));
  folder_.write("model/additional_chat_templates/tool_use.jinja", "");
  test::expect_error([&] { check_save(to, config_.model, tokenizer); },
                     {"holds additional_chat_templates/tool_use.jinja of"});
  EXPECT_NO_THROW(check_save(to, config_.model, folder_.path("gone.json"))) << "its copy may be in the folder";
  to.lora = "adapter";
  std::filesystem::remove(folder_.path("model/config.json"));
  EXPECT_NO_THROW(check_save(to, config_.model, ""));
}

// A folder holds a model or an adapter, because transformers would add the adapter to the model.
TEST_F(SaveModel, RefusesAModelBesideAnAdapter) {
  const std::string adapter = folder_.path("adapter");
  const std::string model = folder_.path("model");
  config_.model.lora = 2;
  Trainer trainer(config_);
  save_adapter(adapter, config_.model, trainer.weights());
  save_model(model, config_.model, config_.data.sequence, trainer.weights());
  const std::vector<std::string> of_adapter = {"adapter_config.json", "adapter_model.safetensors"};
  const std::vector<std::string> of_model = {"config.json", "model.safetensors"};
  const std::vector<std::string> parts = {"holds an adapter", "save.model"};
  test::expect_error([&] { save(adapter); }, parts);
  test::expect_error([&] { save_adapter(model, config_.model, trainer.weights()); }, {"holds a model", "save.model"});
  SaveConfig to;
  to.model = adapter;
  test::expect_error([&] { check_save(to, config_.model); }, parts);
  to.lora = "adapter";
  EXPECT_NO_THROW(check_save(to, config_.model));
  to.model = model;
  test::expect_error([&] { check_save(to, config_.model); }, {"holds a model"});
  EXPECT_EQ(files_in(adapter), of_adapter);
  EXPECT_EQ(files_in(model), of_model);
}

// Nothing is saved then: neither the folder nor a file in it.
TEST_F(SaveModel, RefusesNumbersThatTheFilesCannotHold) {
  const std::string name = trainer_.weights().back()->name();
  at::Tensor number = trainer_.weights().back()->master.view({-1})[0];
  const auto refuse = [&](double value, const std::string& dtype, const std::vector<std::string>& parts) {
    number.fill_(value);
    test::expect_error([&] { save(folder_.path("deep/model"), {.dtype = dtype}); }, parts);
    EXPECT_FALSE(std::filesystem::exists(folder_.path("deep")));
  };
  refuse(70000, "float16", {name, "70000", "beyond the range of Half", "float32"});
  refuse(3.4e38, "bfloat16", {name, "beyond the range of BFloat16"});
  for (const char* dtype : {"float32", "bfloat16", "float16"}) {
    refuse(NAN, dtype, {name, "not finite", "nothing is saved"});
    refuse(-INFINITY, dtype, {name, "not finite"});
  }
  number.fill_(65504);
  EXPECT_NO_THROW(save(folder_.path("model"), {.dtype = "float16"}));
}

TEST_F(SaveModel, RefusesAnUnknownDtype) {
  test::expect_error([&] { save(folder_.path("model"), {.dtype = "int8"}); }, {"int8"});
  EXPECT_FALSE(std::filesystem::exists(folder_.path("model")));
}

// One file replaces several, and several replace one. The last model is always the one that is read.
TEST_F(SaveModel, ShardsReplaceOneFileAndOneFileShards) {
  const std::string model = folder_.path("model");
  const auto expect_current = [&] {
    const ModelWeights weights(model);
    size_t parts = 0;
    for (const Parameter* weight : trainer_.weights()) {
      int64_t row = 0;
      for (const ParameterPart& part : weight->parts()) {
        EXPECT_TRUE(test::same_bits(weights.tensor(part.name), weight->master.narrow(0, row, part.rows)));
        row += part.rows;
        ++parts;
      }
    }
    EXPECT_EQ(weights.names().size(), parts);
  };
  const auto shards_in = [&](const std::string& folder) {
    std::vector<std::string> names = files_in(folder);
    EXPECT_EQ(std::erase(names, "config.json"), 1U);
    return names;
  };
  save(model);
  expect_current();
  trainer_.step();
  save(model, {.max_shard_bytes = 20000});
  expect_current();
  const std::vector<std::string> several = shards_in(model);
  ASSERT_GT(several.size(), 4U);
  const size_t count = several.size() - 1;
  EXPECT_EQ(several.back(), "model.safetensors.index.json");
  for (size_t i = 0; i < count; ++i) {
    EXPECT_EQ(several[i], concat("model-0000", i + 1, "-of-0000", count, ".safetensors"));
    const SafetensorsFile shard(model + "/" + several[i]);
    size_t bytes = 0;
    for (const std::string& name : shard.names()) bytes += shard.tensor(name).nbytes();
    EXPECT_LE(bytes, 20000U);
    if (i + 1 < count) {  // the first tensor of the next shard did not fit
      EXPECT_GT(bytes, 10000U);
    }
  }
  trainer_.step();
  save(model, {.max_shard_bytes = 10000});
  expect_current();
  EXPECT_GT(shards_in(model).size(), several.size());
  save(model, {.max_shard_bytes = 1});  // every tensor is too large
  expect_current();
  EXPECT_EQ(shards_in(model).size(), ModelWeights(model).names().size() + 1);
  trainer_.step();
  save(model);
  expect_current();
  EXPECT_EQ(shards_in(model), std::vector<std::string>{"model.safetensors"});
}

TEST_F(SaveModel, IndexCountsBytes) {
  const std::string model = folder_.path("model");
  save(model, {.dtype = "bfloat16", .max_shard_bytes = 10000});
  int64_t elements = 0;
  for (const Parameter* weight : trainer_.weights()) elements += weight->numel();
  const json index = json::parse(read_file(model + "/model.safetensors.index.json"));
  EXPECT_EQ(index.at("metadata").at("total_size"), 2 * elements);
}

TEST_F(SaveModel, StoresLowerPrecisions) {
  for (const auto& [name, type] : {std::pair{"bfloat16", at::kBFloat16}, {"float16", at::kHalf}}) {
    const std::string model = folder_.path(name);
    save(model, {.dtype = name});
    const ModelWeights weights(model);
    const at::Tensor norm = trainer_.weights().back()->master;
    EXPECT_TRUE(test::same_bits(weights.tensor(trainer_.weights().back()->name()), norm.to(type)));
    EXPECT_EQ(json::parse(read_file(model + "/config.json")).at("torch_dtype"), name);
  }
}

// The files that came with a loaded model are saved with it.
TEST_F(SaveModel, KeepsTheCompanionsOfTheLoadedModel) {
  const std::string from = folder_.path("from");
  save(from);
  json config = json::parse(read_file(from + "/config.json"));
  config["bos_token_id"] = 17;
  folder_.write("from/config.json", config.dump());
  folder_.write("from/tokenizer.json", "a tokenizer");
  folder_.write("from/generation_config.json", "");
  folder_.write("from/preprocessor_config.json", "how pictures are read");
  std::filesystem::create_directory(from + "/additional_chat_templates");
  folder_.write("from/additional_chat_templates/tool_use.jinja", "with tools");
  folder_.write("from/README.md", "not copied");
  config_.model.from = from;
  const std::string model = folder_.path("model");
  save(model);
  EXPECT_EQ(files_in(model),
            (std::vector<std::string>{"additional_chat_templates", "config.json", "generation_config.json",
                                      "model.safetensors", "preprocessor_config.json", "tokenizer.json"}));
  EXPECT_EQ(read_file(model + "/additional_chat_templates/tool_use.jinja"), "with tools");
  EXPECT_EQ(read_file(model + "/tokenizer.json"), "a tokenizer");
  EXPECT_EQ(json::parse(read_file(model + "/config.json")).at("bos_token_id"), 17);
  save(from);  // in place
  EXPECT_EQ(read_file(from + "/tokenizer.json"), "a tokenizer");
  EXPECT_EQ(json::parse(read_file(from + "/config.json")).at("bos_token_id"), 17);
  std::filesystem::remove_all(from);  // the folder vanishes after days of training
  save(folder_.path("last"));
  EXPECT_EQ(files_in(folder_.path("last")), (std::vector<std::string>{"config.json", "model.safetensors"}));
}

// A stranger's folder may link to files that are not his, which would be published with the model.
TEST_F(SaveModel, RefusesLinksOutOfTheFolderBeforeTraining) {
  const std::string from = folder_.path("from");
  save(from);
  SaveConfig to;
  to.model = folder_.path("model");
  config_.model.from = from;
  const std::string secret = std::filesystem::canonical(folder_.write("secret", "of the user"));
  const std::string link = from + "/generation_config.json";
  std::filesystem::create_symlink(secret, link);
  test::expect_error([&] { check_save(to, config_.model, ""); }, {link, secret, "outside of its folder"});
  test::expect_error([&] { save(to.model); }, {link, "outside of its folder"});
  EXPECT_FALSE(std::filesystem::exists(to.model));
  std::filesystem::remove(link);
  const std::string tokenizer = from + "/tokenizer.json";
  std::filesystem::create_symlink(secret, tokenizer);
  test::expect_error([&] { check_save(to, config_.model, tokenizer); }, {tokenizer, "outside of its folder"});
  std::filesystem::remove(tokenizer);
  std::filesystem::create_directory(folder_.path("templates"));
  folder_.write("templates/tool_use.jinja", "of the user");
  std::filesystem::create_directory_symlink(folder_.path("templates"), from + "/additional_chat_templates");
  test::expect_error([&] { check_save(to, config_.model, ""); }, {"tool_use.jinja", "outside of its folder"});
  std::filesystem::remove(from + "/additional_chat_templates");
  folder_.write("from/real.json", "a configuration");
  std::filesystem::create_symlink("real.json", link);
  check_save(to, config_.model, "");
  save(to.model);
  EXPECT_EQ(read_file(to.model + "/generation_config.json"), "a configuration");
  EXPECT_FALSE(std::filesystem::is_symlink(to.model + "/generation_config.json"));
}

// Hugging Face's cache has the files of a model as links: snapshots/REVISION/NAME -> ../../blobs/HASH.
TEST_F(SaveModel, FollowsTheLinksOfHuggingFacesCache) {
  const std::string from = folder_.path("models--a--b/snapshots/0123");
  save(from);
  std::filesystem::create_directory(folder_.path("models--a--b/blobs"));
  folder_.write("models--a--b/blobs/4567", "a tokenizer");
  std::filesystem::create_symlink("../../blobs/4567", from + "/tokenizer.json");
  config_.model.from = from;
  const std::string model = folder_.path("model");
  save(model);
  EXPECT_EQ(read_file(model + "/tokenizer.json"), "a tokenizer");
}

// After training, a full disk would leave the weights unsaved.
TEST_F(SaveModel, RefusesFilesThatTheDiskCannotHoldBeforeTraining) {
  const std::string from = folder_.path("from");
  save(from);
  config_.model.from = from;
  folder_.write("from/vocab.txt", "");
  const uint64_t free = std::filesystem::space(from).available;
  std::error_code too_large;
  std::filesystem::resize_file(from + "/vocab.txt", 2 * free, too_large);
  if (too_large) GTEST_SKIP() << "this file system has no sparse files of such a size";
  SaveConfig to;
  to.model = folder_.path("model");
  test::expect_error([&] { check_save(to, config_.model, ""); }, {from + "/vocab.txt", "the disk of"});
}

// The run's own tokenizer is saved as a whole, instead of that of the model from which it began.
TEST_F(SaveModel, SavesTheTokenizerOfTheRun) {
  for (const char* name : {"from", "own"}) std::filesystem::create_directory(folder_.path(name));
  for (const char* name : {"tokenizer.json", "vocab.json", "generation_config.json"})
    folder_.write(std::string("from/") + name, "of the old model");
  SaveModelOptions options;
  options.tokenizer = folder_.write("own/my.json", "its own");
  folder_.write("own/tokenizer_config.json", "its settings");
  for (const char* name : {"from", "own"}) {
    std::filesystem::create_directory(folder_.path(std::string(name) + "/additional_chat_templates"));
    folder_.write(std::string(name) + "/additional_chat_templates/of_" + name + ".jinja", name);
  }
  folder_.write("own/generation_config.json", "of another model");
  config_.model.from = folder_.path("from");
  const std::string model = folder_.path("model");
  save(model, options);
  EXPECT_EQ(read_file(model + "/tokenizer.json"), "its own");
  EXPECT_EQ(read_file(model + "/tokenizer_config.json"), "its settings");
  EXPECT_EQ(read_file(model + "/generation_config.json"), "of the old model");
  EXPECT_FALSE(std::filesystem::exists(model + "/vocab.json"));
  EXPECT_EQ(files_in(model + "/additional_chat_templates"), std::vector<std::string>{"of_own.jinja"});
  options.tokenizer = model;  // it is there already
  save(model, options);
  EXPECT_EQ(read_file(model + "/tokenizer.json"), "its own");
  std::filesystem::remove_all(folder_.path("own"));  // the folder vanishes after days of training
  options.tokenizer = folder_.path("own/my.json");
  save(folder_.path("last"), options);
  EXPECT_EQ(files_in(folder_.path("last")),
            (std::vector<std::string>{"config.json", "generation_config.json", "model.safetensors"}));
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
