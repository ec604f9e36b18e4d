// Tests the models against transformers itself, all families by the same checks. Models that transformers saved give
// its logits, loss and gradient norm here, and its weights after a step of SGD for any number of stages, to the same
// bits for each. transformers loads the models that are saved here, to the bit. transformers_oracle.py makes the models
// and the expected values. The tests are skipped if Python has no transformers.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <numeric>
#include <ostream>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/train/helpers.h"
#include "tests/train/training.h"
#include "twobp/data/text/python.h"
#include "twobp/models/decoder/family.h"
#include "twobp/models/hf_config.h"
#include "twobp/models/model_type.h"
#include "twobp/nn/layers/rope.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/train/build_model.h"
#include "twobp/train/weights/save_model.h"
#include "twobp/train/weights/weight_files.h"

namespace twobp::TWOBP_FILE {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::same_bits;
using Tensors = std::map<std::string, at::Tensor>;

constexpr double kTolerance = 1e-5;  // relative; both sides compute in float32

struct Family {
  friend void PrintTo(const Family& family, std::ostream* out) { *out << family.name; }

  std::string name;
  std::vector<std::string> cases;
  std::vector<std::string> keys = {"data.sequence=32", "pipeline.micro_batch_size=2"};
  double step_error = 1e-3;  // of a weight's change in a step
  double last_bits = 0;      // of the weight, which the difference of two weights may lose besides
};

const std::vector<std::string> kDecoders = {"llama",
                                            "llama-dynamic",
                                            "mistral",
                                            "qwen2",
                                            "qwen3",
                                            "phi3",
                                            "phi3-longrope",
                                            "olmo2",
                                            "gemma",
                                            "gemma2",
                                            "gemma3_text",
                                            "smollm3",
                                            "gpt2",
                                            "gpt_neox",
                                            "gpt_neox-serial",
                                            "granite",
                                            "stablelm",
                                            "starcoder2",
                                            "mixtral",
                                            "mixtral-balanced",
                                            "qwen2_moe",
                                            "qwen3_moe",
                                            "qwen3_moe-normalized",
                                            "olmoe",
                                            "granitemoe",
                                            "gpt_oss",
                                            "gpt_oss-plain",
                                            "deepseek_v2",
                                            "deepseek_v2-limited",
                                            "deepseek_v3",
                                            "deepseek_v3-halves"};
const Family kFamilies[] = {{"decoders", kDecoders, {"data.sequence=32", "pipeline.micro_batch_size=2"}, 3e-3},
                            {"llama", {"grouped", "tied", "plain"}},
                            {"bert", {"tied", "untied"}},
                            {"mamba", {"tied", "untied"}, {"data.sequence=39", "pipeline.micro_batch_size=2"}},
                            {"resnet", {"bottleneck", "basic", "deep"}, {"pipeline.micro_batch_size=6"}, 1e-3, 2}};

double largest(const at::Tensor& tensor) {
  return tensor.abs().max().item<double>();
}
double relative_error(const at::Tensor& actual, const at::Tensor& expected) {
  return largest(actual - expected) / largest(expected);
}

// Copies every part of packed parameters, and the buffers, under its name.
Tensors parts_of(const std::vector<Parameter*>& parameters) {
  Tensors parts;
  for (const Parameter* parameter : parameters) {
    if (parameter->is_buffer()) parts[parameter->name()] = parameter->master.clone();
    if (parameter->is_buffer()) continue;
    for (const auto& [name, rows] : parameter->parts_of(parameter->master))
      EXPECT_TRUE(parts.emplace(name, rows.clone()).second) << name << " twice";
  }
  return parts;
}

void expect_same_parts(const Tensors& actual, const Tensors& expected, const std::string& what) {
  for (const auto& [part, value] : expected) {
    ASSERT_TRUE(actual.contains(part)) << what << ": " << part;
    EXPECT_TRUE(same_bits(actual.at(part), value)) << what << ": " << part;
  }
}

class OfTransformers : public ::testing::Test {
 protected:
  void begin(const Family& family) {
    family_ = &family;
    auto& folder = folders_[family.name];
    if (folder) return;
    folder = std::make_unique<test::TempFolder>();
    const std::string made = ask_oracle("make");
    if (made.starts_with("skip")) {
      folder.reset();
      GTEST_SKIP() << made;
    }
    ASSERT_EQ(made, "ok");
  }

  static const std::string& family() { return family_->name; }
  static const std::vector<std::string>& cases() { return family_->cases; }

  // Calls the oracle's function of that name and returns the answer.
  static std::string ask_oracle(const std::string& function) {
    // One process for all families, because it imports transformers, which takes seconds.
    static PythonProcess python("transformers_oracle.py",
                                test::read_file(TWOBP_SOURCE_DIR "/tests/train/transformers_oracle.py"), {},
                                /*timeout=*/300);
    static const std::string has_packages = python.read_line();
    if (has_packages != "ok") return has_packages;
    python.write(concat(function, " ", family(), " ", path(""), "\n"));
    return python.read_line();
  }
  static std::string path(const std::string& name) { return folders_.at(family())->path(name); }
  static json facts(const std::string& folder) { return json::parse(test::read_file(path(folder + "/facts.json"))); }

  // The tensors of transformers, under their names in files.
  static Tensors theirs(const std::string& name, const std::string& file) {
    const SafetensorsFile tensors(path(name + "/" + file));
    const json names = facts(name).at("names");
    Tensors found;
    for (const auto& [module, stored] : names.items())
      if (tensors.contains(module)) found[stored.get<std::string>()] = tensors.tensor(module).clone();
    return found;
  }

  // Makes a step of plain SGD on the data of case `name`, in two micro-batches.
  static Config config_of(const std::string& name, int stages, const std::string& model = "model") {
    std::vector<std::string> keys = {"model.from=" + path(name + "/" + model),
                                     "data.arrays=" + path(name + "/data"),
                                     "data.held_out=0",
                                     "data.shuffle=false",
                                     "optimizer.type=sgd",
                                     "optimizer.weight_decay=0",
                                     "optimizer.schedule=constant",
                                     "pipeline.micro_batches=2",
                                     "pipeline.pin=false",
                                     concat("pipeline.stages=", stages)};
    keys.insert(keys.end(), family_->keys.begin(), family_->keys.end());
    Config config = load_config("", keys);
    config.optimizer.lr = facts(name).at("lr").get<double>();
    return config;
  }

  // The logits of all positions, or pictures, in evaluation.
  static at::Tensor logits(const Config& config, const Fields& fields) {
    std::vector<std::unique_ptr<Layer>> layers;
    std::vector<Parameter*> parameters;
    for (const LayerSpec& spec : build_model(config.model).layers) {
      layers.push_back(spec.make());
      layers.back()->collect_parameters(parameters);
    }
    for (Parameter* parameter : parameters) parameter->allocate_value(1);
    load_weights(parameters, config.model.weights());
    Context context;
    context.fields = &fields;
    context.training = false;
    context.wants_logits = true;
    std::vector<Saved> saved(layers.size());
    Values x;
    if (fields.contains("pixel_values")) x = {fields.at("pixel_values")};
    for (size_t i = 0; i < layers.size(); ++i) x = layers[i]->forward(std::move(x), context, saved[i]);
    return x[0];
  }
  static at::Tensor logits_in(const std::string& folder) {
    return SafetensorsFile(path(folder + "/logits.safetensors")).tensor("logits").clone();
  }

  static inline const Family* family_ = nullptr;
  static inline std::map<std::string, std::unique_ptr<test::TempFolder>> folders_;
};

class Transformers : public OfTransformers, public ::testing::WithParamInterface<Family> {
 protected:
  void SetUp() override { begin(GetParam()); }
};

TEST_P(Transformers, LogitsAreThoseOfTransformers) {
  for (const std::string& name : cases()) {
    const Config config = config_of(name, 1);
    std::vector<int64_t> all(family() == "resnet" ? 12 : 4);
    std::iota(all.begin(), all.end(), 0);
    const Fields fields = open_data(config.data, config.model.input(), 1).train->read(all, kEvaluation);
    at::Tensor actual = logits(config, fields), expected = logits_in(name);
    if (family() == "bert") {  // the output at padding does not count
      const at::Tensor real = fields.at("attention_mask").ne(0).unsqueeze(2);
      actual = actual * real;
      expected = expected * real;
    }
    EXPECT_LT(relative_error(actual, expected), kTolerance) << name;
  }
}

TEST_P(Transformers, LossAndAStepOfSgdAreThoseOfTransformers) {
  for (const std::string& name : cases()) {
    const Tensors before = theirs(name, "before.safetensors"), after = theirs(name, "after.safetensors");
    const auto loss = facts(name).at("loss").get<double>(), norm = facts(name).at("grad_norm").get<double>();
    double largest_step = 0;
    for (const auto& [part, value] : after) largest_step = std::max(largest_step, largest(value - before.at(part)));
    Tensors of_one_stage;
    for (const int stages : {1, 2, 3}) {
      const std::string what = concat(name, ", stages ", stages);
      SCOPED_TRACE(what);
      Trainer trainer(config_of(name, stages));
      EXPECT_TRUE(trainer.new_parameters().empty());
      const Tensors loaded = parts_of(trainer.weights());
      ASSERT_EQ(loaded.size(), before.size());
      expect_same_parts(loaded, before, what);
      const StepResult step = trainer.step();
      EXPECT_NEAR(step.loss, loss, kTolerance * loss);
      EXPECT_NEAR(step.grad_norm, norm, kTolerance * norm);
      const Tensors parts = parts_of(trainer.weights());
      if (stages > 1) {
        expect_same_parts(parts, of_one_stage, what);
        continue;
      }
      of_one_stage = parts;
      for (const auto& [part, value] : parts) {
        const at::Tensor& expected = after.at(part);
        if (!value.is_floating_point()) {
          EXPECT_TRUE(same_bits(value, expected)) << part;
          continue;
        }
        EXPECT_LT(relative_error(value, expected), kTolerance) << part;
        const double change = largest(expected - before.at(part));
        // A bias of the keys shifts all scores of a query by the same amount, so its gradient is 0 up to rounding.
        if (part.ends_with("key.bias")) {
          EXPECT_LT(largest(value - before.at(part)), 1e-5 * largest_step) << part;
          continue;
        }
        // Steps are much smaller than weights. So they are compared, too.
        const double last_bit = 0x1p-23 * largest(expected);
        const double least = GetParam().last_bits > 0 ? 100 * last_bit : 1e-4;
        if (family() == "decoders" && change < least) continue;  // lost in the weight's last digits
        EXPECT_GT(change, least) << part;
        EXPECT_LT(largest((value - before.at(part)) - (expected - before.at(part))),
                  GetParam().step_error * change + GetParam().last_bits * last_bit)
            << part;
      }
    }
  }
}

// As it was loaded, and after a step: in several files, in bfloat16, and from a process for each stage.
TEST_P(Transformers, LoadsTheSavedModel) {
  std::map<std::string, Tensors> expected;
  for (const std::string& name : cases()) {
    const Config config = config_of(name, 2);
    Trainer trainer(config);
    const auto save = [&](const std::string& to, const SaveModelOptions& options) {
      save_model(path(name + "/" + to), config.model, config.data.sequence, trainer.weights(), options);
      expected[name + "/" + to] = parts_of(trainer.weights());
    };
    save("saved", {});
    trainer.step();
    save("saved-trained", {.max_shard_bytes = 9000});
    const bool corrected = name == "deepseek_v3";
    if (family() != "llama" && !corrected) continue;
    EXPECT_TRUE(fs::exists(path(name + "/saved-trained/model.safetensors.index.json")));
    save("saved-bf16", {.dtype = "bfloat16"});
    for (auto& [part, value] : expected[name + "/saved-bf16"]) {
      if (!part.ends_with("e_score_correction_bias")) value = value.to(at::kBFloat16);
    }
    if (corrected) continue;
    expected[name + "/saved-together"] = expected[name + "/saved-trained"];
    run_worlds(make_in_process_ranks(1, 2, 0), [&](World world) {
      const Processes processes(*world.processes, 60);
      Trainer one(config, std::move(world));
      one.step();
      save_model(path(name + "/saved-together"), config.model, config.data.sequence, one.weights(), {}, processes);
    });
    EXPECT_TRUE(fs::exists(path(name + "/saved-together/model-00002-of-00002.safetensors")));
  }
  ASSERT_EQ(ask_oracle("check"), "ok");
  for (const auto& [to, parts] : expected) {
    SCOPED_TRACE(to);
    const std::string name = fs::path(to).parent_path();
    const json original = facts(name), found = facts(to);
    // If BERT's decoder is not tied, its own bias is used. transformers looks for a second one, which it does not use.
    const json problems = family() == "bert" && name == "untied" ? json{"cls.predictions.bias"} : json::array();
    EXPECT_EQ(found.at("problems"), problems);
    EXPECT_EQ(found.at("dtype"), to.ends_with("bf16") ? "torch.bfloat16" : "torch.float32");
    for (const char* fact : {"tied", "kept"}) EXPECT_EQ(found.at(fact), original.at(fact)) << fact;
    const SafetensorsFile weights(path(to + "/weights.safetensors"));
    EXPECT_EQ(weights.names().size(), parts.size() + problems.size());
    for (const auto& [module, stored] : original.at("names").items()) {
      const std::string part = stored.get<std::string>();
      EXPECT_TRUE(same_bits(weights.tensor(module), parts.at(part))) << part;
    }
    // Our program loads it again.
    if (!to.ends_with("bf16")) {
      const Config again = config_of(name, 3, fs::path(to).filename());
      EXPECT_EQ(again.model.type.name(), config_of(name, 1).model.type.name());
      expect_same_parts(parts_of(Trainer(again).weights()), parts, "loaded again");
    }
    // The same weights give the same logits only if config.json agrees.
    if (to.ends_with("/saved")) {
      EXPECT_LT(relative_error(logits_in(to), logits_in(name)), 1e-6) << "a setting was lost on the way";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Transformers, ::testing::ValuesIn(kFamilies),
                         [](const auto& info) { return info.param.name; });

// ---- what only some families have

class DecoderTransformers : public OfTransformers {
 protected:
  void SetUp() override { begin(kFamilies[0]); }
};

TEST_F(DecoderTransformers, HasACaseOfEveryFamily) {
  for (const DecoderFamily& one : decoder_families())
    EXPECT_NE(std::find(cases().begin(), cases().end(), one.name), cases().end()) << one.name;
}

// Packed documents run under transformers' block-diagonal mask, with positions that restart in each document.
TEST_F(DecoderTransformers, LossAndGradientsOfPackedDocumentsAreThoseOfTransformers) {
  for (const std::string name : {"llama", "qwen3", "gpt2"}) {
    const SafetensorsFile documents(path(name + "/packed/documents.safetensors"));
    Fields fields;
    for (const char* field : {"input_ids", "labels", "document_starts"})
      fields[field] = documents.tensor(field).clone();
    const Tensors expected = theirs(name, "packed/gradients.safetensors");
    for (const int stages : {1, 3}) {
      SCOPED_TRACE(concat(name, ", stages ", stages));
      Config config = config_of(name, stages);
      constexpr double kLr = 1 << 20;  // so that no gradient is lost in the rounding of the weights
      config.optimizer.lr = kLr;
      Trainer trainer(config);
      const Tensors before = parts_of(trainer.weights());
      const StepResult step = trainer.step(make_batch({fields}), trainer.variant());
      const json packed = facts(name + "/packed");
      const auto loss = packed.at("loss").get<double>(), norm = packed.at("grad_norm").get<double>();
      EXPECT_NEAR(step.loss, loss, kTolerance * loss);
      EXPECT_NEAR(step.grad_norm, norm, kTolerance * norm);
      for (const auto& [part, value] : parts_of(trainer.weights()))
        EXPECT_LT(relative_error((before.at(part) - value) / kLr, expected.at(part)), kTolerance) << part;
      Fields joined = fields;
      joined.erase("document_starts");
      Trainer other(config);
      EXPECT_GT(std::abs(other.step(make_batch({joined}), other.variant()).loss - loss), 1e-3) << "without them";
    }
  }
}

// Every gradient of a mixture, in float64: the router's choices and the loss that balances them.
TEST_F(DecoderTransformers, GradientsOfMixturesAreThoseOfTransformers) {
  int mixtures = 0;
  for (const std::string& name : cases()) {
    if (!fs::exists(path(name + "/exact"))) continue;
    SCOPED_TRACE(name);
    ++mixtures;
    const Config config = config_of(name, 1);
    std::vector<std::unique_ptr<Layer>> layers;
    std::vector<Parameter*> parameters;
    const auto& options = config.model.type.as<DecoderOptions>();
    for (const LayerSpec& spec :
         decoder(decoder_family(config.model.type.name()), options, {.dtype = at::kDouble}).layers)
      layers.push_back(spec.make());
    for (const auto& layer : layers) layer->collect_parameters(parameters);
    for (Parameter* parameter : parameters) {
      parameter->allocate_value(1);
      parameter->allocate_grad();
    }
    load_weights(parameters, config.model.weights());
    const auto data = open_data(config.data, config.model.input(), 1).train;
    const std::vector<Fields> fields = {data->read({0, 1}, 0), data->read({2, 3}, 0)};
    int64_t targets = 0;
    for (const Fields& one : fields) targets += one.at("labels").ne(-100).sum().item<int64_t>();
    double loss = 0;
    for (const Fields& one : fields) {
      Context context;
      context.fields = &one;
      context.loss_weight = 1.0 / static_cast<double>(targets);
      std::vector<Saved> saved(layers.size());
      Values x = {one.at("input_ids")};
      for (size_t i = 0; i < layers.size(); ++i) x = layers[i]->forward(std::move(x), context, saved[i]);
      loss += x[0].item<double>();
      x.clear();
      std::vector<P2Unit> units;
      for (size_t i = layers.size(); i-- > 0;) {
        x = layers[i]->backward_p1(std::move(x), context, saved[i]);
        layers[i]->collect_p2(saved[i], units);
      }
      for (const P2Unit& unit : units) unit.layer->backward_p2({&unit.saved, 1});
    }
    const auto expected_loss = facts(name + "/exact").at("loss").get<double>();
    EXPECT_NEAR(loss, expected_loss, 1e-12 * expected_loss);
    const Tensors expected = theirs(name, "exact/gradients.safetensors");
    size_t compared = 0;
    for (const Parameter* parameter : parameters) {
      if (!parameter->trainable()) continue;  // what corrects the choice of experts
      for (const auto& [part, gradient] : parameter->parts_of(parameter->grad)) {
        const bool idle = largest(expected.at(part)) == 0;  // an expert without tokens
        EXPECT_LT(idle ? largest(gradient) : relative_error(gradient, expected.at(part)), 1e-10) << part;
        ++compared;
      }
    }
    EXPECT_EQ(compared, expected.size());
  }
  EXPECT_GE(mixtures, 13);
}

// transformers saves all experts of a layer in one tensor, if it is asked for the names of its modules.
TEST_F(DecoderTransformers, LoadsExpertsInOneTensor) {
  for (const std::string& name : cases()) {
    if (!fs::exists(path(name + "/module"))) continue;
    SCOPED_TRACE(name);
    const SafetensorsFile file(path(name + "/module/model.safetensors"));
    const auto is_stack = [](const std::string& one) { return one.ends_with(".experts.gate_up_proj"); };
    const std::vector<std::string> names = file.names();
    EXPECT_TRUE(std::any_of(names.begin(), names.end(), is_stack));
    expect_same_parts(parts_of(Trainer(config_of(name, 2, "module")).weights()), theirs(name, "before.safetensors"),
                      name);
  }
}

class LlamaTransformers : public OfTransformers {
 protected:
  void SetUp() override { begin(kFamilies[1]); }
};

TEST_F(LlamaTransformers, FrequenciesAreThoseOfTransformers) {
  for (const std::string& name : cases()) {
    const DecoderOptions model = test::llama_of(config_of(name, 1));
    const RopeSettings rope{model.rope_theta,     parse_rope_scaling(model.rope_scaling),
                            model.rope_factor,    model.rope_low_freq,
                            model.rope_high_freq, model.rope_original_positions};
    const auto expected = facts(name).at("inv_freq").get<std::vector<double>>();
    const at::Tensor actual = rope_frequencies(rope, model.head_dim);
    ASSERT_EQ(actual.numel(), static_cast<int64_t>(expected.size()));
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(actual[static_cast<int64_t>(i)].item<double>(), expected[i], 1e-6 * expected[i]) << name << i;
    }
  }
}

class BertTransformers : public OfTransformers {
 protected:
  void SetUp() override { begin(kFamilies[2]); }
};

// The file has an encoder only. Its tensors are loaded under any of their names. The trainer makes a head and lists it
// as new.
TEST_F(BertTransformers, AnEncoderGetsAHead) {
  for (const std::string& name : cases()) {
    const Tensors before = theirs(name, "before.safetensors");
    Trainer trainer(config_of(name, 2, "encoder"));
    const std::vector<std::string>& made = trainer.new_parameters();
    EXPECT_EQ(made.size(), name == "tied" ? 5u : 6u);
    const std::string prefix = name == "tied" ? "" : "bert.";
    EXPECT_EQ(trainer.unused_tensors(),
              (std::vector<std::string>{prefix + "pooler.dense.bias", prefix + "pooler.dense.weight"}));
    for (const auto& [part, value] : parts_of(trainer.weights())) {
      const bool is_new = std::find(made.begin(), made.end(), part) != made.end();
      EXPECT_EQ(is_new, part.starts_with("cls.")) << part;
      EXPECT_TRUE(is_new || same_bits(value, before.at(part))) << part;
    }
    const double first = trainer.step().loss;
    EXPECT_TRUE(std::isfinite(first));
    save_model(path(name + "/whole"), trainer.config().model, 32, trainer.weights(), {});
    Trainer whole(config_of(name, 1, "whole"));
    EXPECT_TRUE(whole.new_parameters().empty());
    EXPECT_LT(whole.step().loss, first);
  }
}

TEST_F(BertTransformers, DropoutComesFromTheFileUnlessGiven) {
  json config = json::parse(test::read_file(path("tied/model/config.json")));
  config["hidden_dropout_prob"] = 0.2;
  config["attention_probs_dropout_prob"] = 0.3;
  fs::create_directories(path("dropping"));
  std::ofstream(path("dropping/config.json")) << config.dump();
  std::vector<std::string> keys = {"model.from=" + path("dropping"), "data.arrays=" + path("tied/data"),
                                   "data.sequence=32"};
  for (const double dropout : {0.2, 0.0}) {
    const BertOptions read = load_config("", keys).model.type.as<BertOptions>();
    EXPECT_EQ(read.dropout, dropout);
    EXPECT_EQ(read.attention_dropout, 0.3);
    keys.emplace_back("model.dropout=0");
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
