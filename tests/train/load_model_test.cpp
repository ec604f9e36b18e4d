// Tests loading of weights from a directory: the parts of packed weights, every float type, frozen weights and
// adapters. Also tests the errors for a directory that does not fit.
#include <cmath>
#include <filesystem>
#include <functional>
#include <map>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/train/helpers.h"
#include "tests/train/training.h"
#include "twobp/models/hf_config.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/stage.h"
#include "twobp/train/build_model.h"
#include "twobp/train/weights/save_model.h"
#include "twobp/train/weights/weight_files.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_error;
using test::same_bits;
using test::TempFolder;
using Tensors = std::map<std::string, at::Tensor>;

Tensors parts_of(const std::vector<Parameter*>& parameters) {
  Tensors parts;
  for (const Parameter* parameter : parameters) {
    int64_t row = 0;
    for (const ParameterPart& part : parameter->parts()) {
      parts[part.name] = parameter->master.narrow(0, row, part.rows).clone();
      row += part.rows;
    }
  }
  return parts;
}

// The directory has the tiny LLaMa as initialised from seed 1234. The configuration starts from it.
class LoadModel : public ::testing::Test {
 protected:
  LoadModel() { make(false); }

  void make(bool tied) {
    Config config = test::tiny_config();
    test::llama_of(config).tied = tied;
    config.train.seed = 1234;
    Trainer trainer(config);
    save_model(folder_.path("model"), config.model, config.data.sequence, trainer.weights());
    tensors_ = parts_of(trainer.weights());
    config_ = test::tiny_config();
    config_.model.from = folder_.path("model");
    config_.model.type = read_hf_config(config_.model.from);
  }

  void write(const std::function<void(Tensors&)>& change) const {
    Tensors changed = tensors_;
    change(changed);
    write_safetensors(folder_.path("model/model.safetensors"), {changed.begin(), changed.end()}, {});
  }
  void refuse(const std::function<void(Tensors&)>& change, std::vector<std::string> parts) const {
    write(change);
    parts.push_back(folder_.path("model"));
    expect_error([&] { Trainer{config_}; }, parts);
  }

  TempFolder folder_;
  Tensors tensors_;
  Config config_;
};

TEST_F(LoadModel, GivesEveryRankItsParts) {
  for (const bool tied : {false, true}) {
    make(tied);
    EXPECT_EQ(test::llama_of(config_).tied, tied);
    for (const int stages : {1, 2, 3, 8}) {
      config_.pipeline.stages = stages;
      Trainer trainer(config_);
      const Tensors loaded = parts_of(trainer.weights());
      ASSERT_EQ(loaded.size(), tensors_.size());
      for (const auto& [name, value] : loaded) EXPECT_TRUE(same_bits(value, tensors_.at(name))) << name;
      // These are both uses of a tied weight, on any stage.
      const Tensors last = parts_of(
          trainer.pipeline().stage(stages - 1).parameters(trainer.pipeline().stage(stages - 1).layer_count() - 1));
      const std::string head = tied ? "model.embed_tokens.weight" : "lm_head.weight";
      EXPECT_TRUE(same_bits(last.at(head), tensors_.at(head)));
    }
  }
}

TEST_F(LoadModel, TrainsAsTheModelItWasSavedFrom) {
  Config original = test::tiny_config();
  original.train.seed = 1234;
  const auto batches = test::random_batches(2, 2);
  for (const bool tied : {false, true}) {
    make(tied);
    test::llama_of(original).tied = tied;
    for (const int stages : {1, 3}) {
      original.pipeline.stages = config_.pipeline.stages = stages;
      const Variant variant{"1f1b", P2Policy::kFill};
      test::expect_same_bits(test::train(original, batches, variant), test::train(config_, batches, variant),
                             concat("tied ", tied, ", stages ", stages));
    }
  }
}

TEST_F(LoadModel, ConvertsEveryFloatType) {
  for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16}) {
    write([&](Tensors& tensors) {
      for (auto& [name, tensor] : tensors) tensor = tensor.to(type);
    });
    const Tensors loaded = parts_of(Trainer(config_).weights());
    for (const auto& [name, value] : loaded) {
      EXPECT_TRUE(same_bits(value, tensors_.at(name).to(type).to(at::kFloat))) << name << " " << type;
    }
  }
}

TEST_F(LoadModel, ComputesWithTheRoundedWeightsInLowPrecision) {
  config_.train.precision = "bf16";
  config_.model.freeze = {"model.embed_tokens.weight"};
  config_.pipeline.stages = 2;
  Trainer trainer(config_);
  for (const Parameter* parameter : trainer.weights()) {
    const bool matrix = parameter->sizes().size() > 1;  // norms compute in float32
    EXPECT_EQ(parameter->value.scalar_type(), matrix ? at::kBFloat16 : at::kFloat);
    EXPECT_TRUE(same_bits(parameter->value, parameter->master.to(parameter->value.scalar_type()))) << parameter->name();
  }
  for (const auto& [name, value] : parts_of(trainer.weights())) {
    const bool frozen = name == "model.embed_tokens.weight";
    EXPECT_TRUE(same_bits(value, frozen ? tensors_.at(name).to(at::kBFloat16) : tensors_.at(name))) << name;
  }
}

TEST_F(LoadModel, KeepsTheInitialAdapters) {
  Config fresh = test::tiny_config();
  fresh.model.lora = config_.model.lora = 2;
  const Tensors expected = parts_of(Trainer(fresh).weights());
  const Tensors loaded = parts_of(Trainer(config_).weights());
  ASSERT_EQ(loaded.size(), tensors_.size() + 12);  // A and B of q and v in three blocks
  for (const auto& [name, value] : loaded) {
    const bool adapter = name.find(".lora_") != std::string::npos;
    EXPECT_TRUE(same_bits(value, adapter ? expected.at(name) : tensors_.at(name))) << name;
  }
}

TEST_F(LoadModel, LoadsParametersOfASingleThread) {
  const auto model = build_model(config_.model);
  std::vector<std::unique_ptr<Layer>> layers;
  std::vector<Parameter*> parameters;
  for (const LayerSpec& spec : model.layers) {
    layers.push_back(spec.make());
    layers.back()->collect_parameters(parameters);
  }
  for (Parameter* parameter : parameters) parameter->allocate_value(5);
  load_weights(parameters, ModelWeights(config_.model.from));
  for (const auto& [name, value] : parts_of(parameters)) EXPECT_TRUE(same_bits(value, tensors_.at(name))) << name;
}

// Additional tensors must equal the model's own. transformers 5 treats a head that differs from the embedding as
// another weight. Older versions used the frequencies of the file.
TEST_F(LoadModel, ComparesAdditionalTensors) {
  const std::string frequencies = "model.layers.0.self_attn.rotary_emb.inv_freq";
  const at::Tensor right = 1 / at::pow(10000, at::arange(0, 8, 2, at::kFloat) / 8);
  for (const at::ScalarType type : {at::kFloat, at::kHalf, at::kBFloat16}) {
    write([&](Tensors& t) { t[frequencies] = right.to(type); });
    EXPECT_NO_THROW(Trainer{config_});
  }
  refuse([&](Tensors& t) { t[frequencies] = right * 1.001; }, {frequencies, "follow from config.json"});
  refuse([&](Tensors& t) { t[frequencies] = at::ones({3}); }, {frequencies, "follow from config.json"});
  make(true);
  const std::string embedding = "model.embed_tokens.weight";
  write([&](Tensors& t) { t["lm_head.weight"] = t[embedding].clone(); });
  EXPECT_NO_THROW(Trainer{config_});
  refuse(
      [&](Tensors& t) {
        t["lm_head.weight"] = t[embedding].clone();
        t["lm_head.weight"][5][3].add_(1e-3);
      },
      {"lm_head.weight differs from " + embedding, "tie_word_embeddings"});
  refuse([](Tensors& t) { t["lm_head.weight"] = at::ones({3}); }, {"lm_head.weight differs"});
  refuse([](Tensors& t) { t["bert.embeddings.position_ids"] = at::ones({3}); }, {"position_ids is not known"});
}

// Makes a directory of some model with additional tensors. Returns the error for it, or "".
std::string complaint(const ModelOptions& options, const std::function<void(Tensors&)>& change) {
  Tensors tensors;
  ModelConfig config;
  config.type = options;
  const ModelSpec model = build_model(config);
  for (const LayerSpec& spec : model.layers) {
    const auto layer = spec.make();
    std::vector<Parameter*> parameters;
    layer->collect_parameters(parameters);
    for (const Parameter* parameter : parameters) {
      for (const auto& [name, rows] : parameter->parts_of(at::rand(parameter->sizes()))) {
        tensors.emplace(name, rows.clone());
      }
    }
  }
  change(tensors);
  const TempFolder folder;
  write_safetensors(folder.path("model.safetensors"), {tensors.begin(), tensors.end()}, {});
  try {
    check_weights(model, ModelWeights(folder.path(""), options.type().names(options)));
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

void expect_in(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "no \"" << part << "\" in: " << text;
}

TEST(FurtherTensors, OfABertAreCompared) {
  BertOptions bert;
  bert.dim = 8;
  bert.layers = 1;
  bert.heads = 2;
  bert.vocab = 11;
  bert.positions = 6;
  bert.tied = true;
  const std::string words = "bert.embeddings.word_embeddings.weight";
  const std::string decoder = "cls.predictions.decoder.";
  const auto whole = [&](Tensors& t) {
    t["bert.embeddings.position_ids"] = at::arange(6).unsqueeze(0);
    t["bert.pooler.dense.weight"] = at::ones({8, 8});
    t[decoder + "weight"] = t[words].clone();
    t[decoder + "bias"] = t["cls.predictions.bias"].clone();
  };
  EXPECT_EQ(complaint(bert, whole), "");
  for (const char* name : {"weight", "bias"}) {
    const auto other = [&](Tensors& t) {
      whole(t);
      t[decoder + name].add_(1e-3);
    };
    expect_in(complaint(bert, other), decoder + name + " differs from ");
  }
  const auto backwards = [&](Tensors& t) { t["bert.embeddings.position_ids"] = at::arange(5, -1, -1); };
  expect_in(complaint(bert, backwards), "position_ids has other values");
  // transformers has both biases, and uses only that of the decoder.
  bert.tied = false;
  EXPECT_EQ(complaint(bert, [](Tensors& t) { t["cls.predictions.bias"] = at::zeros({11}); }), "");
}

TEST(FurtherTensors, OfAMambaAreCompared) {
  MambaOptions mamba;
  mamba.dim = 8;
  mamba.layers = 1;
  mamba.vocab = 11;
  mamba.tied = true;
  const std::string words = "backbone.embeddings.weight";
  const auto with = [&](const std::string& name, double more) {
    return complaint(mamba, [&](Tensors& t) { t[name] = t[words] + more; });
  };
  EXPECT_EQ(with("lm_head.weight", 0), "");
  expect_in(with("lm_head.weight", 1), "lm_head.weight differs from " + words);
  EXPECT_EQ(with("backbone.embedding.weight", 0), "");  // the old name of the same tensor
  expect_in(with("backbone.embedding.weight", 1), "two names of one tensor");
}

// The message does not blame the learning rate for these weights.
TEST_F(LoadModel, NamesNumbersThatAreNotFinite) {
  const std::string k = "model.layers.1.self_attn.k_proj.weight";
  const auto with = [&](double value, at::ScalarType type) {
    return [=](Tensors& t) {
      t[k] = t[k].to(type);
      t[k][3][5].fill_(value);
    };
  };
  for (const at::ScalarType type : {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble}) {
    refuse(with(NAN, type), {k, "not finite", "damaged"});
    refuse(with(-INFINITY, type), {k, "not finite", "damaged"});
  }
  refuse(with(1e39, at::kDouble), {k, "1e+39", "beyond the range of Float"});
  write(with(70000, at::kFloat));
  EXPECT_NO_THROW(Trainer{config_});
  config_.train.precision = "fp16";
  for (const std::vector<std::string>& frozen :
       {std::vector<std::string>{}, {"*.k_proj.*", "*.q_proj.*", "*.v_proj.*"}}) {
    config_.model.freeze = frozen;
    refuse(with(70000, at::kFloat), {k, "70000", "beyond the range of Half", "bf16"});
  }
}

TEST_F(LoadModel, RefusesTensorsThatDoNotFit) {
  const std::string k = "model.layers.1.self_attn.k_proj.weight";
  refuse([&](Tensors& t) { t.erase(k); }, {k + " is missing"});
  refuse([&](Tensors& t) { t.erase("lm_head.weight"); }, {"lm_head.weight is missing"});
  refuse([&](Tensors& t) { t["extra"] = at::ones({1}); }, {"extra is not known"});
  refuse([&](Tensors& t) { t[k] = at::ones({32, 32}); }, {k + " is [32, 32] instead of [16, 32]"});
  refuse([&](Tensors& t) { t[k] = at::ones({512}); }, {k + " is [512] instead of [16, 32]"});
  refuse([&](Tensors& t) { t[k] = at::ones({16, 32}, at::kLong); }, {k, "Long", "BF16"});
  refuse([&](Tensors& t) { t.clear(); }, {"model.embed_tokens.weight is missing", "and 25 more"});
  refuse(
      [&](Tensors& t) {
        t.erase(k);
        t["model.norm.weight"] = at::ones({1, 32});
        for (const char* name : {"a", "b", "c", "d"}) t[name] = at::ones({1});
      },
      {k + " is missing", "model.norm.weight is [1, 32] instead of [32]", "a is not known", "b is not known",
       "c is not known", "and 1 more"});
  test::llama_of(config_).layers = 4;  // as if config.json had this number
  refuse([](Tensors&) {}, {"model.layers.3.input_layernorm.weight is missing"});
}

// The sizes in config.json are compared with the weights before any memory is allocated for them.
TEST_F(LoadModel, RefusesAHugeModelWithoutAllocating) {
  test::llama_of(config_).dim = 1 << 20;
  test::llama_of(config_).hidden = 1 << 22;
  test::llama_of(config_).vocab = 1 << 24;
  refuse([](Tensors&) {}, {"model.embed_tokens.weight is [64, 32] instead of [16777216, 1048576]", "more"});
}

TEST_F(LoadModel, RefusesUnknownTypesByName) {
  write([](Tensors& t) { t["model.norm.weight"] = at::ones({32}, at::kInt); });
  expect_error([&] { Trainer{config_}; }, {"model.norm.weight", "Int"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
