// Tests LLaMa against transformers itself. Models that transformers saved give its logits and loss here. The weights
// after one step of SGD are the same for any number of stages. transformers loads the models that are saved here, to
// the bit. The tests are skipped if Python has no transformers.
#include <filesystem>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/train/transformers_fixture.h"
#include "twobp/nn/layers/rope.h"
#include "twobp/train/weights/save_model.h"

namespace twobp::TWOBP_FILE {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::parts_of;
using test::relative_error;
using test::same_bits;

const std::vector<std::string> kCases = {"grouped", "tied", "plain"};

class Transformers : public test::TransformersTest {
 protected:
  static void SetUpTestSuite() { make_models("transformers_oracle"); }
  static Config config_of(const std::string& name, int stages) {
    return sgd_config(name, stages, {"data.sequence=32", "pipeline.micro_batch_size=2"});
  }
};

TEST_F(Transformers, LogitsAreThoseOfTransformers) {
  for (const std::string& name : kCases) {
    const Config config = config_of(name, 1);
    const at::Tensor actual = logits(config, samples(config, {0, 1, 2, 3}, 0));
    EXPECT_LT(relative_error(actual, expected_logits(name)), kTolerance) << name;
  }
}

TEST_F(Transformers, LossAndAStepOfSgdAreThoseOfTransformers) {
  for (const std::string& name : kCases) {
    const SafetensorsFile before(path(name + "/before.safetensors"));
    const SafetensorsFile after(path(name + "/after.safetensors"));
    const auto loss = facts(name).at("loss").get<double>();
    for (const int stages : {1, 2, 3}) {
      SCOPED_TRACE(concat(name, ", stages ", stages));
      Trainer trainer(config_of(name, stages));
      expect_same_parts(parts_of(trainer.weights()), before);
      EXPECT_NEAR(trainer.step().loss, loss, kTolerance * loss);
      const auto parts = parts_of(trainer.weights());
      ASSERT_EQ(parts.size(), after.names().size());
      for (const auto& [part, value] : parts) {
        expect_same_step(part, value, before.tensor(part), after.tensor(part));
      }
    }
  }
}

TEST_F(Transformers, LoadsTheSavedModel) {
  std::map<std::string, std::map<std::string, at::Tensor>> expected;
  for (const std::string& name : kCases) {
    const Config config = config_of(name, 2);
    Trainer trainer(config);
    const auto save = [&](const std::string& to, const SaveModelOptions& options) {
      save_model(path(name + "/" + to), config.model, config.data.sequence, trainer.weights(), options);
    };
    save("saved", {});
    trainer.step();
    save("saved-trained", {.max_shard_bytes = 9000});
    save("saved-bf16", {.dtype = "bfloat16"});
    for (const auto& [part, value] : parts_of(trainer.weights())) expected[name][part] = value.clone();
    // There is one process per stage, each with files of its own.
    run_worlds(make_in_process_ranks(1, 2, 0), [&](World world) {
      const Processes processes(*world.processes, 60);
      Trainer one(config, std::move(world));
      one.step();
      save_model(path(name + "/saved-together"), config.model, config.data.sequence, one.weights(), {}, processes);
    });
  }
  ASSERT_EQ(ask_oracle("check"), "ok");
  for (const std::string& name : kCases) {
    SCOPED_TRACE(name);
    const SafetensorsFile before(path(name + "/before.safetensors"));
    const SafetensorsFile saved(path(name + "/saved/weights.safetensors"));
    const SafetensorsFile trained(path(name + "/saved-trained/weights.safetensors"));
    const SafetensorsFile together(path(name + "/saved-together/weights.safetensors"));
    const SafetensorsFile bf16(path(name + "/saved-bf16/weights.safetensors"));
    EXPECT_EQ(saved.names(), before.names());
    EXPECT_EQ(trained.names(), before.names());
    EXPECT_EQ(together.names(), before.names());
    EXPECT_EQ(bf16.names(), before.names());
    for (const std::string& part : before.names()) {
      EXPECT_TRUE(same_bits(saved.tensor(part), before.tensor(part))) << part;
      EXPECT_TRUE(same_bits(trained.tensor(part), expected[name][part])) << part;
      EXPECT_TRUE(same_bits(together.tensor(part), expected[name][part])) << part;
      EXPECT_TRUE(same_bits(bf16.tensor(part), expected[name][part].to(at::kBFloat16))) << part;
    }
    EXPECT_TRUE(fs::exists(path(name + "/saved-trained/model.safetensors.index.json")));
    EXPECT_TRUE(fs::exists(path(name + "/saved-together/model-00002-of-00002.safetensors")));
    const json original = facts(name);
    for (const char* to : {"/saved", "/saved-trained", "/saved-together", "/saved-bf16"}) {
      const json again = facts(name + to);
      for (const char* fact : {"inv_freq", "tied", "bos", "positions"}) {
        EXPECT_EQ(again.at(fact), original.at(fact)) << to << " " << fact;
      }
      EXPECT_EQ(again.at("dtype"), std::string(to) == "/saved-bf16" ? "torch.bfloat16" : "torch.float32");
    }
  }
}

TEST_F(Transformers, FrequenciesAreThoseOfTransformers) {
  for (const std::string& name : kCases) {
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

}  // namespace
}  // namespace twobp::TWOBP_FILE
