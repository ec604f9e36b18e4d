// Tests every family of decoders against transformers itself: logits, loss, gradient norm and the weights after a step
// of SGD for any number of stages, greedy generation token by token, and saved models that transformers loads. The
// tests are skipped if Python has no transformers.
#include <algorithm>
#include <cmath>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/train/transformers_fixture.h"
#include "twobp/models/decoder/family.h"
#include "twobp/models/hf_config.h"
#include "twobp/train/weights/save_model.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;
using test::parts_of;
using test::relative_error;
using test::same_bits;

const std::vector<std::string> kCases = {"llama",       "llama-dynamic", "mistral",   "qwen2",    "qwen3",
                                         "phi3",        "phi3-longrope", "olmo2",     "gemma",    "gemma2",
                                         "gemma3_text", "smollm3",       "gpt2",      "gpt_neox", "gpt_neox-serial",
                                         "granite",     "stablelm",      "starcoder2"};

class DecoderTransformers : public test::TransformersTest {
 protected:
  static void SetUpTestSuite() { make_models("decoder_oracle"); }
  static Config config_of(const std::string& name, int stages) {
    return sgd_config(name, stages, {"data.sequence=32", "pipeline.micro_batch_size=2"});
  }
  // Returns the tensors of transformers, under their names in files.
  static std::map<std::string, at::Tensor> theirs(const std::string& name, const std::string& file) {
    const SafetensorsFile tensors(path(name + "/" + file));
    std::map<std::string, at::Tensor> found;
    const json names = facts(name).at("names");
    for (const auto& [module, stored] : names.items())
      found[stored.get<std::string>()] = tensors.tensor(module).clone();
    return found;
  }
};

TEST_F(DecoderTransformers, HasACaseOfEveryFamily) {
  for (const DecoderFamily& family : decoder_families())
    EXPECT_NE(std::find(kCases.begin(), kCases.end(), family.name), kCases.end()) << family.name;
}

TEST_F(DecoderTransformers, LogitsAreThoseOfTransformers) {
  for (const std::string& name : kCases) {
    const Config config = config_of(name, 1);
    const at::Tensor actual = logits(config, samples(config, {0, 1, 2, 3}, 0));
    EXPECT_LT(relative_error(actual, expected_logits(name)), kTolerance) << name;
  }
}

// The weights after the step are also the same to the bit for all stages.
TEST_F(DecoderTransformers, LossAndAStepOfSgdAreThoseOfTransformers) {
  for (const std::string& name : kCases) {
    const auto before = theirs(name, "before.safetensors");
    const auto after = theirs(name, "after.safetensors");
    const auto loss = facts(name).at("loss").get<double>();
    const auto norm = facts(name).at("grad_norm").get<double>();
    std::map<std::string, at::Tensor> of_one_stage;
    for (const int stages : {1, 2, 3}) {
      SCOPED_TRACE(concat(name, ", stages ", stages));
      Trainer trainer(config_of(name, stages));
      const StepResult step = trainer.step();
      EXPECT_NEAR(step.loss, loss, kTolerance * loss);
      EXPECT_NEAR(step.grad_norm, norm, kTolerance * norm);
      const auto parts = parts_of(trainer.weights());
      ASSERT_EQ(parts.size(), after.size());
      for (const auto& [part, value] : parts) {
        if (stages == 1) of_one_stage[part] = value.clone();
        EXPECT_TRUE(same_bits(value, of_one_stage[part])) << part;
        EXPECT_LT(relative_error(value, after.at(part)), kTolerance) << part;
        const at::Tensor change = after.at(part) - before.at(part);
        if (change.abs().max().item<double>() < 1e-4) continue;  // lost in the weight's last digits
        EXPECT_LT(relative_error(value - before.at(part), change), 3e-3) << part;
      }
    }
  }
}

// Packed documents run under transformers' block-diagonal mask, with positions that restart in each document.
TEST_F(DecoderTransformers, LossAndGradientsOfPackedDocumentsAreThoseOfTransformers) {
  for (const std::string name : {"llama", "qwen3", "gpt2"}) {
    const SafetensorsFile documents(path(name + "/packed/documents.safetensors"));
    Fields fields;
    for (const char* field : {"input_ids", "labels", "document_starts"})
      fields[field] = documents.tensor(field).clone();
    const auto expected = theirs(name, "packed/gradients.safetensors");
    for (const int stages : {1, 3}) {
      SCOPED_TRACE(concat(name, ", stages ", stages));
      Config config = config_of(name, stages);
      constexpr double kLr = 1 << 20;  // so that no gradient is lost in the rounding of the weights
      config.optimizer.lr = kLr;
      Trainer trainer(config);
      std::map<std::string, at::Tensor> before;
      for (const auto& [part, value] : parts_of(trainer.weights())) before[part] = value.clone();
      const StepResult step = trainer.step(make_batch({fields}), trainer.variant());
      const auto loss = facts(name + "/packed").at("loss").get<double>();
      const auto norm = facts(name + "/packed").at("grad_norm").get<double>();
      EXPECT_NEAR(step.loss, loss, kTolerance * loss);
      EXPECT_NEAR(step.grad_norm, norm, kTolerance * norm);
      for (const auto& [part, value] : parts_of(trainer.weights())) {
        const at::Tensor gradient = (before.at(part) - value) / kLr;
        EXPECT_LT(relative_error(gradient, expected.at(part)), kTolerance) << part;
      }
      fields.erase("document_starts");
      Trainer joined(config);
      EXPECT_GT(std::abs(joined.step(make_batch({fields}), joined.variant()).loss - loss), 1e-3) << "without them";
      fields["document_starts"] = documents.tensor("document_starts").clone();
    }
  }
}

TEST_F(DecoderTransformers, LoadsTheSavedModel) {
  std::map<std::string, std::map<std::string, at::Tensor>> expected;
  for (const std::string& name : kCases) {
    const Config config = config_of(name, 2);
    Trainer trainer(config);
    const auto save = [&](const std::string& to) {
      save_model(path(name + "/" + to), config.model, config.data.sequence, trainer.weights(), {});
    };
    save("saved");
    trainer.step();
    save("saved-trained");
    for (const auto& [part, value] : parts_of(trainer.weights())) expected[name][part] = value.clone();
  }
  ASSERT_EQ(ask_oracle("check"), "ok");
  for (const std::string& name : kCases) {
    SCOPED_TRACE(name);
    const auto before = theirs(name, "before.safetensors");
    for (const auto& [part, value] : theirs(name, "saved/weights.safetensors"))
      EXPECT_TRUE(same_bits(value, before.at(part))) << part;
    for (const auto& [part, value] : theirs(name, "saved-trained/weights.safetensors"))
      EXPECT_TRUE(same_bits(value, expected[name].at(part))) << part;
    // The same weights give the same logits only if config.json agrees.
    const SafetensorsFile again(path(name + "/saved/logits.safetensors"));
    EXPECT_LT(relative_error(again.tensor("logits"), expected_logits(name)), 1e-6);
    EXPECT_EQ(read_hf_config(path(name + "/saved")).name(), config_of(name, 1).model.type.name());
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
