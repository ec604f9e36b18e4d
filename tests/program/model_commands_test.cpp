// Tests the commands from training to using a model, from outside: train and eval, with and without adapters.
#include <filesystem>

#include "tests/program/subprocess.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;
using test::expect_success;
using test::Finished;
using test::read_file;

class ModelCommands : public test::InAFolder {
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
  Finished run(const std::string& command, const json& content, std::vector<std::string> more = {}) const {
    std::vector<std::string> arguments = {command, InAFolder::config(content)};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return expect_success(arguments);
  }
  static double number_after(const std::string& text, const std::string& what) {
    const size_t at = text.rfind(what);
    if (at == std::string::npos) throw std::runtime_error("no \"" + what + "\" in: " + text);
    return std::stod(text.substr(at + what.size()));
  }
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
  EXPECT_FALSE(std::filesystem::exists(path("deep")));
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
