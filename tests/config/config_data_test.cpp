// Tests which data a configuration may name for each model.
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/model_options.h"
#include "tests/train/helpers.h"
#include "twobp/train/config.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_error;

// The data is text, so that the tests can vary other keys.
Config with(std::vector<std::string> overrides) {
  overrides.insert(overrides.begin(), "data.text=*.txt");
  return load_config("", overrides);
}

void refuse(const std::vector<std::string>& overrides, const std::vector<std::string>& parts) {
  expect_error([&] { with(overrides); }, parts);
}

TEST(ConfigErrors, RefuseContradictionsInTheData) {
  expect_error([] { load_config("", {}); }, {"no data is given", "data.text"});
  refuse({"data.arrays=folder"}, {"data.text and data.arrays"});
  refuse({"data.synthetic=tokens"}, {"data.text and data.synthetic"});
  refuse({"data.tokens=*.bin"}, {"data.text and data.tokens"});
  refuse({"data.tokens=*.bin", "data.arrays=folder"}, {"data.text and data.tokens and data.arrays"});
  expect_error(
      [] {
        load_config("", {"data.tokens=*.bin", "data.tokenizer=folder"});
      },
      {"data.tokenizer", "no data.text", "data.tokens"});
  EXPECT_NO_THROW(load_config("", {"data.tokens=*.bin", "model.vocab=4096"}));
  refuse({"model.vocab=4096"}, {"model.vocab is 4096", "256", "data.tokenizer"});
  refuse({"model.vocab=255"}, {"model.vocab is 255", "256"});
  EXPECT_NO_THROW(with({"model.vocab=4096", "data.tokenizer=folder"}));
  Config loaded = with({});
  loaded.model.from = "folder";  // The folder may have a tokenizer.
  test::llama_of(loaded).vocab = 4096;
  EXPECT_NO_THROW(check_config(loaded));
  EXPECT_NO_THROW(load_config("", {"data.arrays=folder", "model.vocab=4096"}));
  refuse({"model.type=mlp"}, {"model.type is \"mlp\"", "data.text", "\"vectors\""});
  expect_error([] { load_config("", {"data.synthetic=vectors"}); }, {"\"vectors\"", "model.type is \"llama\""});
}

TEST(ConfigErrors, RefuseDataThatTheModelCannotRead) {
  const auto refuse_data = [](std::vector<std::string> overrides, const std::vector<std::string>& parts) {
    expect_error([&] { load_config("", overrides); }, parts);
  };
  refuse_data({"data.synthetic=images"}, {"data.synthetic", "reads tokens", "data.text"});
  refuse_data({"data.tokens=a", "data.arrays=b"}, {"data.tokens and data.arrays"});
  refuse_data({"model.type=resnet", "data.text=*.txt"}, {"data.text", "reads pictures", "data.arrays"});
  refuse_data({"model.type=resnet", "data.synthetic=tokens"}, {"\"tokens\"", "\"images\""});
  EXPECT_NO_THROW(load_config("", {"model.type=resnet", "data.arrays=folder"}));
  refuse_data({"model.type=bert", "data.text=*.txt"}, {"model.vocab is 256", "260", "4 special", "data.tokenizer"});
  EXPECT_NO_THROW(load_config("", {"model.type=bert", "data.text=*.txt", "model.vocab=260"}));
  EXPECT_NO_THROW(load_config("", {"model.type=bert", "data.text=*.txt", "model.vocab=999", "data.tokenizer=folder"}));
  refuse_data({"model.type=bert", "data.tokens=*.bin"}, {"data.tokens", "special", "data.tokenizer"});
  EXPECT_NO_THROW(load_config("", {"model.type=bert", "data.tokens=*.bin", "data.tokenizer=folder"}));
  refuse_data({"model.type=bert", "data.text=*.txt", "model.vocab=260", "data.sequence=2"},
              {"data.sequence is 2", "at least 3"});
}

// A key that the data source does not use is an error, unless it has its default value.
TEST(ConfigErrors, RefuseKeysThatTheDataDoesNotUse) {
  const std::vector<std::string> images = {"model.type=resnet", "data.arrays=folder"};
  const std::vector<std::string> bert = {"model.type=bert", "model.vocab=260"};
  const auto load = [](std::vector<std::string> overrides, const std::vector<std::string>& more) {
    overrides.insert(overrides.end(), more.begin(), more.end());
    return load_config("", overrides);
  };
  for (const char* set : {"data.crop=none", "data.image_size=8", "data.flip=true", "data.mean=0.5", "data.std=1",
                          "data.padding=2", "data.token_type=uint32", "data.cache=folder"}) {
    const std::string key = std::string(set).substr(0, std::string(set).find('='));
    refuse({set}, {key + " is set", "data.text does not use it", "it is for data.", "Remove " + key});
  }
  refuse({"data.mask_probability=0.3"}, {"data.mask_probability", "does not use it", "\"llama\"", "\"bert\""});
  expect_error([&] { load(images, {"data.sequence=8"}); }, {"data.sequence", "data.arrays of pictures", "data.text"});
  expect_error([&] { load(images, {"data.padding=2"}); }, {"data.padding", "data.crop \"shift\""});
  expect_error([&] { load(images, {"data.tokenizer=folder"}); }, {"data.tokenizer", "no data.text"});
  expect_error(
      [&] {
        load({"model.type=resnet", "data.synthetic=images"}, {"data.crop=none"});
      },
      {"data.crop", "data.synthetic images does not use it"});
  expect_error(
      [&] {
        load({"model.type=resnet", "data.arrays=folder"}, {"data.sequence=8"});
      },
      {"data.sequence", "data.arrays of pictures does not use it"});
  expect_error(
      [&] {
        load(bert, {"data.arrays=folder", "data.mask_probability=0.3"});
      },
      {"data.mask_probability", "data.arrays of tokens does not use it"});

  EXPECT_NO_THROW(load(bert, {"data.text=*.txt", "data.mask_probability=0.3"}));
  EXPECT_NO_THROW(load(images, {"data.crop=shift", "data.padding=2", "data.image_size=8", "data.mean=0.5"}));
  EXPECT_NO_THROW(load({}, {"data.tokens=*.bin", "data.token_type=uint32", "data.sequence=8"}));
  EXPECT_NO_THROW(with({"data.cache=folder", "data.tokenizer=folder"}));
  EXPECT_NO_THROW(load({"model.type=mlp", "data.synthetic=vectors"}, {"data.sequence=8"}));
  // One is a fully printed configuration. The other is in the checkpoint of a version that allowed these
  // keys.
  const Config config = with({"data.crop=", "data.padding=4"});
  EXPECT_NO_THROW(parse_config(config_to_json(config), "", {"data.crop=none"}));
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
