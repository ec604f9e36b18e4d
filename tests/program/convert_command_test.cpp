// Tests `twobp checkpoint` from outside: the output of inspect, the findings of verify, and the files that convert
// makes.
#include <filesystem>

#include "tests/program/subprocess.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;
using test::expect_one_message;
using test::expect_success;
using test::Finished;
using test::lines_of;
using test::read_file;

class CheckpointCommand : public test::InAFolder {
 protected:
  CheckpointCommand() {
    content_ = test::tiny_config();
    content_["train"]["steps"] = 4;
    content_["save"] = {{"checkpoints", path("checkpoints")}, {"every", 2}, {"model", path("model")}};
  }
  void train() const { expect_success({"train", config(content_)}); }
  void flip_a_bit(const std::string& name) const {
    std::string content = read_file(path(name));
    content[content.size() / 2] ^= 4;
    folder_.write(name, content);
  }

  json content_;
};

TEST_F(CheckpointCommand, Inspects) {
  content_["model"]["freeze"] = {"*.o_proj.weight"};
  train();
  const Finished newest = expect_success({"checkpoint", "inspect", path("checkpoints"), "--json", path("report.json")});
  for (const char* part : {"step-00000004: step 4, 4 updates, 4 batches", "format 3, written by 1 process",
                           "model.dim=16", "weights.safetensors", "frozen.safetensors", "optimizer.safetensors"}) {
    EXPECT_NE(newest.out.find(part), std::string::npos) << part << "\n" << newest.out;
  }
  const json report = json::parse(read_file(path("report.json")));
  EXPECT_EQ(report.at("step"), 4);
  EXPECT_EQ(report.at("processes"), 1);
  EXPECT_EQ(report.at("config").at("model").at("dim"), 16);
  int64_t bytes = 0;
  for (const auto& [name, file] : report.at("files").items()) {
    EXPECT_EQ(file.at("bytes"), std::filesystem::file_size(path("checkpoints/step-00000004/" + name)));
    bytes += file.at("bytes").get<int64_t>();
  }
  EXPECT_EQ(report.at("files").at("frozen.safetensors").at("tensors"), 2);
  EXPECT_EQ(report.at("files").at("frozen.safetensors").at("numbers"), 2 * 16 * 16);
  size_t states = 0;
  for (const json& tensor : report.at("tensors")) {
    if (tensor.at("file") == "optimizer.safetensors") ++states;
  }
  EXPECT_EQ(states, 2 * report.at("files").at("weights.safetensors").at("tensors").get<size_t>());

  const Finished older = expect_success({"checkpoint", "inspect", path("checkpoints/step-00000002/"), "--tensors"});
  EXPECT_NE(older.out.find("step 2,"), std::string::npos) << older.out;
  EXPECT_NE(older.out.find("model.layers.1.self_attn.q_proj.weight.exp_avg_sq"), std::string::npos) << older.out;
}

TEST_F(CheckpointCommand, Verifies) {
  train();
  const Finished whole = expect_success({"checkpoint", "verify", path("checkpoints")});
  EXPECT_NE(whole.out.find("step-00000004 is whole: step 4"), std::string::npos) << whole.out;
  for (const char* name : {"weights.safetensors", "optimizer.safetensors", "state.json"}) {
    const std::string file = std::string("checkpoints/step-00000004/") + name;
    const std::string before = read_file(path(file));
    flip_a_bit(file);
    expect_one_message({"checkpoint", "verify", path("checkpoints")}, {path(file), "damaged"});
    expect_success({"checkpoint", "verify", path("checkpoints/step-00000002")});
    std::filesystem::remove(path(file));
    expect_one_message({"checkpoint", "verify", path("checkpoints/step-00000004")}, {path(file)});
    folder_.write(file, before);
  }
  flip_a_bit("checkpoints/step-00000004/weights.safetensors");
  flip_a_bit("checkpoints/step-00000004/optimizer.safetensors");
  const Finished both = test::run_program({"checkpoint", "verify", path("checkpoints")});
  EXPECT_EQ(both.exit_code, 1);
  EXPECT_EQ(lines_of(both.err).size(), 2U) << both.err;
}

TEST_F(CheckpointCommand, ConvertsToAModel) {
  for (const bool lora : {false, true}) {
    SCOPED_TRACE(lora);
    if (lora) {
      content_["model"]["lora"] = 2;
      content_["model"]["freeze"] = {"model.embed_tokens.weight"};
      content_["optimizer"]["average"] = 0.5;
    }
    std::filesystem::remove_all(path("checkpoints"));
    train();
    expect_success({"checkpoint", "convert", path("checkpoints"), "--model", path("converted")});
    EXPECT_EQ(read_file(path("converted/model.safetensors")), read_file(path("model/model.safetensors")));
    EXPECT_EQ(read_file(path("converted/config.json")), read_file(path("model/config.json")));
  }
  expect_success({"checkpoint", "convert", path("checkpoints"), "--model", path("short"), "--dtype", "bfloat16"});
  EXPECT_LT(read_file(path("short/model.safetensors")).size(), read_file(path("model/model.safetensors")).size() * 0.7);
}

TEST_F(CheckpointCommand, RefusesContradictingArguments) {
  train();
  expect_one_message({"checkpoint", "verify", path("nothing")}, {path("nothing"), "does not exist"});
  expect_one_message({"checkpoint", "inspect", path("model")}, {path("model"), "neither a checkpoint", "state.json"});
  expect_one_message({"checkpoint", "inspect", path("config.json")}, {path("config.json"), "not a folder"});
  expect_one_message({"checkpoint", "convert", path("checkpoints")}, {"--model is required"});
  flip_a_bit("checkpoints/step-00000004/weights.safetensors");
  expect_one_message({"checkpoint", "convert", path("checkpoints"), "--model", path("converted")},
                     {"step-00000004/weights.safetensors", "damaged"});
  EXPECT_FALSE(std::filesystem::exists(path("converted")));
  test::expect_one_message({"checkpoint"}, {"subcommand is required", "twobp checkpoint --help"});
}

// --resume is tested with and without its word, before and after the configuration.
TEST_F(CheckpointCommand, ResumesAutomatically) {
  content_["save"].erase("model");
  const std::string config = this->config(content_);
  const auto expect_resumed = [&](const std::vector<std::string>& arguments, const std::string& text) {
    const Finished result = test::run_program(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_NE(result.out.find(text), std::string::npos) << result.out;
  };
  expect_resumed({"train", config, "--resume", "auto"}, "starting from the beginning");
  expect_resumed({"train", config, "--resume", "auto"}, "resumed after step 4");
  expect_resumed({"train", "--resume", "auto", config}, "resumed after step 4");
  expect_resumed({"train", "--resume=auto", config}, "resumed after step 4");
  expect_resumed({"train", "--resume", config}, "resumed after step 4");
  expect_resumed({"train", config, "--resume", "--set", "train.log_every=1"}, "resumed after step 4");
  flip_a_bit("checkpoints/step-00000004/state.json");
  expect_resumed({"train", config, "--resume", "auto"}, "resumed after step 2");
  expect_one_message({"train", config, "--resume", "newest"}, {"--resume takes no value or auto", "newest"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
