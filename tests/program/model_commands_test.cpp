// Tests the commands from training to using a model, from outside: train, eval, generate, with and without adapters.
#include <filesystem>

#include "tests/program/subprocess.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;
using test::expect_success;
using test::Finished;
using test::read_file;
using test::TempFolder;

class ModelCommands : public ::testing::Test {
 protected:
  ModelCommands() {
    std::string text;
    for (int i = 0; i < 200; ++i) text += "the quick brown fox jumps over the lazy dog. ";
    folder_.write("text.txt", text);
  }

  // Returns the configuration of a byte-level model that is saved to `model`.
  json config() const {
    return {{"model", {{"dim", 32}, {"layers", 2}, {"heads", 2}}},
            {"data", {{"text", path("text.txt")}, {"sequence", 32}, {"held_out", 0.2}}},
            {"pipeline", {{"stages", 2}, {"micro_batches", 2}, {"micro_batch_size", 4}, {"pin", false}}},
            {"optimizer", {{"lr", 1e-2}, {"schedule", "constant"}}},
            {"train", {{"steps", 60}, {"eval_batches", 0}}},
            {"save", {{"model", path("model")}}}};
  }
  json lora_config() const {
    json lora = config();
    lora["model"] = {{"from", path("model")}, {"lora", 2}, {"lora_targets", {"q_proj", "down_proj"}}};
    lora["train"]["steps"] = 10;
    lora["save"] = {{"model", path("adapter")}, {"lora", "adapter"}};
    return lora;
  }
  std::string path(const std::string& name) const { return folder_.path(name); }
  Finished run(const std::string& command, const json& content, std::vector<std::string> more = {}) const {
    std::vector<std::string> arguments = {command, folder_.write("config.json", content.dump())};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return expect_success(arguments);
  }
  static double number_after(const std::string& text, const std::string& what) {
    const size_t at = text.rfind(what);
    if (at == std::string::npos) throw std::runtime_error("no \"" + what + "\" in: " + text);
    return std::stod(text.substr(at + what.size()));
  }

  TempFolder folder_;
};

TEST_F(ModelCommands, EvalFindsTheFinalLossOfTraining) {
  const double trained = number_after(run("train", config()).out, "held-out loss after training: ");
  json of_saved = config();
  of_saved["model"] = {{"from", path("model")}};
  for (const char* stages : {"1", "3"}) {
    const Finished eval =
        run("eval", of_saved, {"--set", std::string("pipeline.stages=") + stages, "--json", path("eval.json")});
    EXPECT_NEAR(number_after(eval.out, "held-out loss "), trained, 5.1e-5) << "train prints four digits";
  }
  const json report = json::parse(read_file(path("eval.json")));
  EXPECT_NEAR(report.at("perplexity").get<double>(), std::exp(report.at("loss").get<double>()), 1e-9);
}

TEST_F(ModelCommands, GenerateContinuesTheLearntText) {
  run("train", config(), {"--set", "train.steps=300"});  // then the next letter is always certain
  const std::vector<std::string> arguments = {"generate", path("model"), "--prompt",      "the quick brown fo",
                                              "--tokens", "12",          "--temperature", "0"};
  const Finished greedy = test::run_program(arguments);
  EXPECT_EQ(greedy.out, "the quick brown fox jumps over\n");
  EXPECT_NE(greedy.err.find("12 tokens after 18"), std::string::npos) << greedy.err;

  // Like transformers' generate, it stops at any eos_token_id of generation_config.json, or else of config.json.
  json config = json::parse(read_file(path("model/config.json")));
  config["eos_token_id"] = {'q', 'j'};
  folder_.write("model/config.json", config.dump());
  EXPECT_EQ(test::run_program(arguments).out, "the quick brown fox \n");
  folder_.write("model/generation_config.json", R"({"eos_token_id": [0, 118, 112]})");  // v and p
  EXPECT_EQ(test::run_program(arguments).out, "the quick brown fox jum\n");
  folder_.write("model/generation_config.json", R"({"eos_token_id": 115})");  // s
  EXPECT_EQ(test::run_program(arguments).out, "the quick brown fox jump\n");
  auto on = arguments;
  on.push_back("--ignore-end");
  EXPECT_EQ(test::run_program(on).out, "the quick brown fox jumps over\n");
  // What would give another text in transformers is named.
  folder_.write(
      "model/generation_config.json",
      R"({"repetition_penalty": 1.0, "num_beams": 1, "top_k": 50, "suppress_tokens": [], "do_sample": true})");
  EXPECT_EQ(test::run_program(arguments).err.find("warning"), std::string::npos);
  folder_.write("model/generation_config.json",
                R"({"repetition_penalty": 1.2, "suppress_tokens": [102], "top_k": 50})");
  const Finished other = test::run_program(arguments);
  EXPECT_EQ(other.exit_code, 0);
  EXPECT_NE(other.err.find("generation_config.json has repetition_penalty, suppress_tokens, which is not supported"),
            std::string::npos)
      << other.err;
  auto warm = arguments;
  warm.back() = "0.5";
  EXPECT_NE(test::run_program(warm).err.find("repetition_penalty, suppress_tokens, top_k"), std::string::npos);
  folder_.write("model/generation_config.json", R"({"eos_token_id": [1, "x"]})");
  const Finished bad = test::run_program(arguments);
  EXPECT_EQ(bad.exit_code, 1);
  EXPECT_NE(bad.err.find("generation_config.json: eos_token_id is "), std::string::npos) << bad.err;
  folder_.write("model/generation_config.json", "{}");

  auto sampled = [&](const char* seed) {
    return test::run_program(
               {"generate", path("model"), "--prompt", "t", "--tokens", "40", "--temperature", "3", "--seed", seed})
        .out;
  };
  EXPECT_EQ(sampled("1"), sampled("1"));
  EXPECT_NE(sampled("1"), sampled("2"));
}

TEST_F(ModelCommands, AdapterIsSavedLoadedEvaluatedAndMerged) {
  run("train", config());
  const double trained = number_after(run("train", lora_config()).out, "held-out loss after training: ");
  EXPECT_TRUE(std::filesystem::exists(path("adapter/adapter_model.safetensors")));
  const json description = json::parse(read_file(path("adapter/adapter_config.json")));
  EXPECT_EQ(description.at("peft_type"), "LORA");
  EXPECT_EQ(description.at("r"), 2);

  json again = lora_config();
  again["model"]["adapter"] = path("adapter");
  EXPECT_NEAR(number_after(run("eval", again).out, "held-out loss "), trained, 5.1e-5);
  // There is no further step. The merged adapter equals the loaded one, up to the rounding of the merge.
  again["save"] = {{"model", path("merged")}};
  again["train"]["steps"] = 1;
  again["optimizer"]["lr"] = 1e-30;
  again["optimizer"]["weight_decay"] = 0;
  run("train", again);
  json merged = config();
  merged["model"] = {{"from", path("merged")}};
  EXPECT_NEAR(number_after(run("eval", merged).out, "held-out loss "), trained, 1.1e-4);
}

TEST_F(ModelCommands, RefusesBadAdapters) {
  run("train", config(), {"--set", "train.steps=1"});
  run("train", lora_config(), {"--set", "train.steps=1"});
  json again = lora_config();
  json merged = lora_config();
  merged["save"] = {{"model", path("adapter")}};
  test::expect_one_message({"train", folder_.write("config.json", merged.dump())},
                           {path("adapter"), "holds an adapter", "save.model"});
  merged["model"]["from"] = path("adapter");
  test::expect_one_message({"train", folder_.write("config.json", merged.dump())},
                           {path("adapter"), "not a model", "model.adapter"});
  again["model"]["adapter"] = path("adapter");
  const auto fails = [&](const json& content, const std::vector<std::string>& parts) {
    const Finished result = test::run_program({"eval", folder_.write("config.json", content.dump())});
    EXPECT_EQ(result.exit_code, 1);
    for (const auto& part : parts) EXPECT_NE(result.err.find(part), std::string::npos) << part << " in " << result.err;
  };
  json other = again;
  other["model"]["lora"] = 3;
  fails(other, {"rank is 2", "model.lora is 3"});
  other = again;
  other["model"]["lora_targets"] = {"q_proj"};
  fails(other, {"down_proj", "model.lora_targets"});
  other["model"]["lora_targets"] = {"q_proj", "down_proj", "up_proj"};
  fails(other, {"no model.layers.0.mlp.up_proj.lora_A.weight"});
  other["model"]["lora_targets"] = {"q_porj"};
  fails(other, {"model.lora_targets", "q_porj", "did you mean \"q_proj\""});
  json description = json::parse(read_file(path("adapter/adapter_config.json")));
  description["use_rslora"] = true;
  folder_.write("adapter/adapter_config.json", description.dump());
  fails(again, {"use_rslora"});
}

// The weights cause this error, not the learning rate.
TEST_F(ModelCommands, ReportsDamagedWeights) {
  run("train", config(), {"--set", "train.steps=1"});
  std::string weights = read_file(path("model/model.safetensors"));
  weights.replace(weights.size() - 4, 4, std::string("\0\0\xc0\x7f", 4));  // NaN
  folder_.write("model/model.safetensors", weights);
  json damaged = config();
  damaged["model"] = {{"from", path("model")}};
  damaged["save"]["model"] = path("deep/model");
  const std::string file = folder_.write("config.json", damaged.dump());
  const std::vector<std::string> parts = {path("model"), "not finite", "damaged"};
  test::expect_one_message({"eval", file}, parts);
  test::expect_one_message({"train", file}, parts);
  test::expect_one_message({"generate", path("model"), "--prompt", "a"}, parts);
  EXPECT_FALSE(std::filesystem::exists(path("deep")));
}

TEST_F(ModelCommands, GenerateReportsBadInput) {
  run("train", config(), {"--set", "train.steps=1"});
  const auto fails = [&](const std::vector<std::string>& arguments, const std::string& part) {
    const Finished result = test::run_program(arguments);
    EXPECT_NE(result.exit_code, 0);
    EXPECT_NE(result.err.find(part), std::string::npos) << part << " in " << result.err;
  };
  fails({"generate", path("none"), "--prompt", "a"}, "none");
  fails({"generate", path("model"), "--prompt", ""}, "has no tokens");
  fails({"generate", path("model"), "--prompt", "a", "--top-p", "2"}, "top-p");
  json config = json::parse(read_file(path("model/config.json")));
  config["vocab_size"] = 300;
  folder_.write("model/config.json", config.dump());
  fails({"generate", path("model"), "--prompt", "a"}, "tokenizer");
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
