// Tests directories with weights: a single file, several files with an index, and every possible error.
#include "twobp/models/model_weights.h"

#include <filesystem>

#include <gtest/gtest.h>

#include "tests/files/safetensors_files.h"
#include "tests/train/helpers.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::entry;
using test::expect_error;
using test::safetensors_file;
using test::TempFolder;

// Makes a file with tensors of one byte each. Each letter is the name of a tensor.
std::string letters(const std::string& names) {
  std::vector<std::string> entries;
  for (size_t i = 0; i < names.size(); ++i) {
    entries.push_back(entry({names[i]}, "U8", "[1]", concat("[", i, ",", i + 1, "]")));
  }
  return safetensors_file(test::header(entries), names);
}

class Weights : public ::testing::Test {
 protected:
  void index(const std::string& map) const {
    folder_.write("model.safetensors.index.json", R"({"metadata":{"total_size":3},"weight_map":)" + map + "}");
  }
  void refuse(const std::vector<std::string>& parts) const {
    expect_error([&] { ModelWeights(folder_.path("")); }, parts);
  }

  TempFolder folder_;
};

TEST_F(Weights, AreReadFromOneFile) {
  folder_.write("model.safetensors", letters("ab"));
  index(R"({"c":"gone.safetensors"})");  // the complete file has priority, as in transformers
  const ModelWeights weights(folder_.path(""));
  EXPECT_EQ(weights.names(), (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(weights.tensor("b").item<uint8_t>(), 'b');
  EXPECT_EQ(weights.shape("b"), std::vector<int64_t>{1});
  EXPECT_TRUE(weights.contains("a"));
  EXPECT_FALSE(weights.contains("c"));
  expect_error([&] { weights.tensor("c"); }, {folder_.path(""), "no tensor \"c\""});
}

// The model has one tensor for two stored names.
TEST_F(Weights, TwoNamesMayMeanOneTensor) {
  TensorNames naming;
  naming.rename = [](const std::string& stored) { return stored.substr(0, 1); };
  const auto two = [&](char of_b) {
    const std::string header = test::header({entry("a", "U8", "[1]", "[0,1]"), entry("a_old", "U8", "[1]", "[1,2]")});
    folder_.write("model.safetensors", safetensors_file(header, std::string("x") + of_b));
    return ModelWeights(folder_.path(""), naming);
  };
  EXPECT_EQ(two('x').names(), std::vector<std::string>{"a"});
  expect_error([&] { two('y'); }, {folder_.path(""), "a_old", "two names of one tensor", "remove"});
}

TEST_F(Weights, AreReadFromSeveralFiles) {
  folder_.write("model-00001-of-00002.safetensors", letters("ca"));
  folder_.write("other.safetensors", letters("b"));
  index(R"({"a":"model-00001-of-00002.safetensors","b":"other.safetensors","c":"model-00001-of-00002.safetensors"})");
  const ModelWeights weights(folder_.path(""));
  EXPECT_EQ(weights.names(), (std::vector<std::string>{"a", "b", "c"}));
  for (const std::string& name : weights.names()) EXPECT_EQ(weights.tensor(name).item<uint8_t>(), name[0]);
}

TEST_F(Weights, FilesMayBeLinks) {  // the cache of huggingface_hub contains links
  const TempFolder blobs;
  std::filesystem::create_symlink(blobs.write("blob", letters("a")), folder_.path("model.safetensors"));
  EXPECT_EQ(ModelWeights(folder_.path("")).tensor("a").item<uint8_t>(), 'a');
}

TEST_F(Weights, ReportAFolderWithoutWeights) {
  expect_error([&] { ModelWeights(folder_.path("none")); }, {"none", "no such folder", "model.safetensors"});
  refuse({"neither model.safetensors nor model.safetensors.index.json"});
  const std::string file = folder_.write("pytorch_model.bin", "x");
  refuse({"pytorch_model.bin is not read", "save_pretrained"});
  expect_error([&] { ModelWeights{file}; }, {file, "is not a folder"});
  std::filesystem::create_directory(folder_.path("model.safetensors"));
  refuse({"model.safetensors", "folder"});
}

TEST_F(Weights, ReportADamagedFile) {
  folder_.write("model.safetensors", letters("ab").substr(0, 50));
  refuse({"model.safetensors", "truncated"});
}

TEST_F(Weights, RefuseAnIndexThatDoesNotFit) {
  folder_.write("one.safetensors", letters("ab"));
  folder_.write("two.safetensors", letters("bc"));
  index(R"({"a":"one.safetensors"})");
  refuse({"one.safetensors", "has \"b\"", "not in model.safetensors.index.json"});
  index(R"({"a":"one.safetensors","b":"one.safetensors","x":"one.safetensors"})");
  refuse({"one.safetensors", "has no \"x\""});
  index(R"({"a":"one.safetensors","b":"one.safetensors","c":"two.safetensors"})");
  refuse({"two.safetensors", "has \"b\"", "in another file"});
  index(R"({"a":"three.safetensors"})");
  refuse({"three.safetensors", "cannot open"});
  index(R"({"a":"one.safetensors","a":"two.safetensors"})");
  refuse({"index.json", "\"a\" is there twice"});
  index(R"({"a":1})");
  refuse({"index.json", "\"a\"", "not a text"});
  index("[]");
  refuse({"index.json", "no weight_map"});
  for (const char* text : {"", "[]", "{", "{\"weight_map\"", "\xff\xfe"}) {
    folder_.write("model.safetensors.index.json", text);
    refuse({"index.json", "JSON"});
  }
  folder_.write("model.safetensors.index.json", "{}");
  refuse({"index.json", "no weight_map"});
  folder_.write("model.safetensors.index.json", "{\"x\":" + std::string(1000, '['));
  refuse({"index.json", "nested deeper"});
}

TEST_F(Weights, RefuseAnIndexThatPointsElsewhere) {
  std::filesystem::create_directories(folder_.path("model/sub"));
  folder_.write("outside.safetensors", letters("a"));
  folder_.write("model/sub/inside.safetensors", letters("a"));
  folder_.write("model/.hidden.safetensors", letters("a"));
  folder_.write("model/weights.bin", letters("a"));
  const std::vector<std::string> names = {"../outside.safetensors",
                                          folder_.path("outside.safetensors"),
                                          "sub/inside.safetensors",
                                          "sub\\\\inside.safetensors",
                                          "..",
                                          "",
                                          ".hidden.safetensors",
                                          "weights.bin",
                                          "a\\u0000.safetensors",
                                          "a\\u001b.safetensors"};
  for (const std::string& name : names) {
    SCOPED_TRACE(name);
    folder_.write("model/model.safetensors.index.json", R"({"weight_map":{"a":")" + name + "\"}}");
    expect_error([&] { ModelWeights(folder_.path("model")); }, {"index.json", "\"a\"", "in the same folder"});
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
