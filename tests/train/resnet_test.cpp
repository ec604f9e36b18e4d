// Tests training of a ResNet: running statistics, which neither the profile nor an evaluation changes, checkpoints,
// freezing, and models saved and loaded with buffers.
#include <filesystem>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/train/checkpoint_runs.h"
#include "tests/train/resnet_training.h"
#include "twobp/files/safetensors.h"
#include "twobp/models/hf_config.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/train/build_model.h"
#include "twobp/train/weights/save_model.h"
#include "twobp/train/weights/weight_files.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;
using test::copies_by_name;
using test::expect_same;
using test::image_batches;
using test::TempFolder;
using test::tiny_resnet;

// PyTorch's own pipelining runs an empty batch through its stages to learn shapes. That shifts the
// statistics.
TEST(Resnet, ProfilingDoesNotChangeRunningStatistics) {
  for (const int stages : {1, 3}) {
    Config config = tiny_resnet("bottleneck");
    config.pipeline.stages = stages;
    Trainer trainer(config);
    int counts = 0;
    for (const auto& [name, value] : copies_by_name(trainer.weights(), /*buffers_only=*/true)) {
      EXPECT_TRUE(value.eq(name.ends_with("running_var") ? 1 : 0).all().item<bool>()) << name;
    }
    trainer.step(image_batches(config, 1, 3)[0], {"1f1b", P2Policy::kFill});
    for (const auto& [name, value] : copies_by_name(trainer.weights(), /*buffers_only=*/true)) {
      if (!name.ends_with("num_batches_tracked")) continue;
      EXPECT_EQ(value.item<int64_t>(), 3) << name << ": it counts each micro-batch once";
      ++counts;
    }
    EXPECT_EQ(counts, 1 + 4 * 3 + 2) << "the stem, three a bottleneck, two projections";
  }
}

// Frozen weights stay. The running statistics of frozen norms still move, as in PyTorch.
TEST(Resnet, FreezingDoesNotStopRunningStatistics) {
  Config config = tiny_resnet("bottleneck");
  config.model.freeze = {"resnet.embedder.*", "resnet.encoder.stages.0.*"};
  config.pipeline.stages = 2;
  Trainer trainer(config);
  const auto before = copies_by_name(trainer.weights());
  trainer.step(image_batches(config, 1, 2)[0], {"1f1b", P2Policy::kFill});
  for (const auto& [name, value] : copies_by_name(trainer.weights())) {
    const bool frozen = name.starts_with("resnet.embedder") || name.starts_with("resnet.encoder.stages.0");
    const bool buffer = name.find("running") != std::string::npos || name.ends_with("tracked");
    EXPECT_EQ(test::same_bits(value, before.at(name)), frozen && !buffer) << name;
  }
}

TEST(Resnet, ResumesWithItsBuffersBitwise) {
  const TempFolder folder;
  Config config = tiny_resnet("basic");
  config.model.freeze = {"resnet.embedder.*"};
  config.pipeline.stages = 2;
  config.pipeline.micro_batches = 2;
  config.train.steps = 4;
  config.save.checkpoints = folder.path("checkpoints");
  config.save.every = 1;
  config.save.keep = 4;
  const test::RunResult whole = test::run(config);
  const std::string weights = config.save.checkpoints + "/" + test::step_name(2);
  const SafetensorsFile file(weights + "/weights.safetensors");
  EXPECT_TRUE(file.contains("resnet.embedder.embedder.normalization.running_mean"));
  EXPECT_EQ(file.tensor("resnet.embedder.embedder.normalization.num_batches_tracked").scalar_type(), at::kLong);
  const SafetensorsFile frozen(weights + "/frozen.safetensors");
  for (const std::string& name : frozen.names()) EXPECT_EQ(name.find("running"), std::string::npos) << name;
  for (const int stages : {1, 3}) {
    Config resumed = config;
    resumed.pipeline.stages = stages;
    resumed.save.checkpoints = test::folder_with(folder, config, 2, concat("from-", stages));
    test::expect_continues(whole, test::run(resumed, /*resume=*/true), concat("stages ", stages));
  }
}

class SavedResnet : public ::testing::Test {
 protected:
  // The model is trained for a step and saved in `model`.
  void SetUp() override {
    config_ = tiny_resnet("bottleneck", /*small_images=*/false);
    Trainer trainer(config_);
    trainer.step(image_batches(config_, 1, 2)[0], {"1f1b", P2Policy::kFill});
    save_model(folder_.path("model"), config_.model, 1, trainer.weights());
    weights_ = copies_by_name(trainer.weights());
  }
  Config loading(const std::string& name) {
    Config config = config_;
    config.model.from = folder_.path(name);
    config.model.type = read_hf_config(config.model.from);
    return config;
  }
  // Writes `model` with other tensors.
  void write(const std::string& name, const std::map<std::string, at::Tensor>& tensors) {
    std::filesystem::create_directory(folder_.path(name));
    std::filesystem::copy(folder_.path("model/config.json"), folder_.path(name + "/config.json"));
    write_safetensors(folder_.path(name + "/model.safetensors"), {tensors.begin(), tensors.end()}, {});
  }

  TempFolder folder_;
  Config config_;
  std::map<std::string, at::Tensor> weights_;
};

TEST_F(SavedResnet, ComesBackWithItsBuffers) {
  Trainer trainer(loading("model"));
  expect_same(copies_by_name(trainer.weights()), weights_, "loaded");
  const SafetensorsFile file(folder_.path("model/model.safetensors"));
  const at::Tensor count = file.tensor("resnet.embedder.embedder.normalization.num_batches_tracked");
  EXPECT_EQ(count.dim(), 0);
  EXPECT_EQ(count.scalar_type(), at::kLong) << "it does not depend on the dtype of the weights";
}

TEST_F(SavedResnet, OnlyTheCountOfBatchesMayBeMissing) {
  auto tensors = weights_;
  std::erase_if(tensors, [](const auto& item) { return item.first.ends_with("num_batches_tracked"); });
  write("old", tensors);
  EXPECT_NO_THROW(Trainer trainer(loading("old")));
  tensors.erase("resnet.embedder.embedder.normalization.running_var");
  write("less", tensors);
  test::expect_error([&] { Trainer trainer(loading("less")); }, {"normalization.running_var is missing"});
  tensors = weights_;
  tensors["resnet.embedder.embedder.normalization.num_batches_tracked"] = at::zeros({}, at::kFloat);
  write("ill", tensors);
  test::expect_error([&] { Trainer trainer(loading("ill")); }, {"num_batches_tracked is Float", "whole numbers"});
}

TEST_F(SavedResnet, LoadsTorchvisionsNames) {
  const std::map<std::string, std::string> some = {
      {"resnet.embedder.embedder.convolution.weight", "conv1.weight"},
      {"resnet.embedder.embedder.normalization.running_mean", "bn1.running_mean"},
      {"resnet.encoder.stages.0.layers.1.layer.2.convolution.weight", "layer1.1.conv3.weight"},
      {"resnet.encoder.stages.1.layers.0.layer.0.normalization.num_batches_tracked",
       "layer2.0.bn1.num_batches_tracked"},
      {"resnet.encoder.stages.1.layers.0.shortcut.convolution.weight", "layer2.0.downsample.0.weight"},
      {"resnet.encoder.stages.0.layers.0.shortcut.normalization.bias", "layer1.0.downsample.1.bias"},
      {"classifier.1.bias", "fc.bias"}};
  auto tensors = weights_;
  for (const auto& [ours, theirs] : some) {
    ASSERT_TRUE(tensors.contains(ours)) << ours;
    tensors[theirs] = tensors[ours];
    tensors.erase(ours);
  }
  write("torchvision", tensors);
  Trainer trainer(loading("torchvision"));
  expect_same(copies_by_name(trainer.weights()), weights_, "loaded");
}

// Otherwise readers of the model would call a class by the name of another.
TEST_F(SavedResnet, NamesTheClassesOfTheRun) {
  Trainer trainer(config_);
  const auto saved = [&](const Config& config, const std::string& name) {
    save_model(folder_.path(name), config.model, 1, trainer.weights(), save_options(config, "float32"));
    const json file = json::parse(test::read_file(folder_.path(name + "/config.json")));
    return std::pair(file.at("id2label"), file.at("label2id"));
  };
  EXPECT_EQ(saved(config_, "unnamed").first.at("4"), "LABEL_4");
  config_.data.arrays = folder_.path("pictures");
  EXPECT_EQ(saved(config_, "gone").first.at("4"), "LABEL_4");
  std::filesystem::create_directory(folder_.path("pictures"));
  folder_.write("pictures/classes.txt", "ant\nbee\ncat\ndog\neel\n");
  const json by_number = {{"0", "ant"}, {"1", "bee"}, {"2", "cat"}, {"3", "dog"}, {"4", "eel"}};
  const json by_name = {{"ant", 0}, {"bee", 1}, {"cat", 2}, {"dog", 3}, {"eel", 4}};
  EXPECT_EQ(saved(config_, "named"), std::pair(by_number, by_name));
  config_.model.from = folder_.path("gone");  // with other names
  EXPECT_EQ(saved(config_, "renamed"), std::pair(by_number, by_name));
}

TEST_F(SavedResnet, HasItsOwnKeyForSmallImages) {
  Config config = tiny_resnet("basic");
  Trainer trainer(config);
  save_model(folder_.path("small"), config.model, 1, trainer.weights());
  const Config again = loading("small");
  EXPECT_TRUE(again.model.type.as<ResnetOptions>().small_images);
  EXPECT_EQ(again.model.type.as<ResnetOptions>().block, "basic");
  EXPECT_EQ(again.model.type.as<ResnetOptions>().widths, config.model.type.as<ResnetOptions>().widths);
  EXPECT_EQ(again.model.type.as<ResnetOptions>().classes, 5);
  EXPECT_FALSE(loading("model").model.type.as<ResnetOptions>().small_images);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
