// Tests pictures as raw pixels in NumPy files, and damaged files.
#include "twobp/data/pixel_dataset.h"

#include <cmath>
#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>

#include "tests/train/helpers.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_error;
using test::npy_file;

std::vector<int64_t> list(const at::Tensor& tensor) {
  const auto* data = tensor.data_ptr<int64_t>();
  return {data, data + tensor.numel()};
}

std::vector<int64_t> all_labels(const Dataset& data) {
  std::vector<int64_t> out;
  for (int64_t i = 0; i < data.size(); ++i) out.push_back(list(data.read({i}, kEvaluation).at("labels"))[0]);
  return out;
}

class ImageData : public testing::Test {
 protected:
  ImageData() {
    model_.classes = 3;
    model_.channels = 3;
    data_.held_out = 0;
  }
  DataSplit open() const { return open_images(data_, model_, 1); }
  void refuse(const std::vector<std::string>& parts) const {
    expect_error([&] { open(); }, parts);
  }

  test::TempFolder folder_;
  DataConfig data_;
  ModelInput model_;
};

class PixelArrays : public ImageData {
 protected:
  PixelArrays() { data_.arrays = folder_.path(""); }
  void pixels(const std::string& content) const { folder_.write("pixel_values.npy", content); }
  void labels(const std::string& content) const { folder_.write("labels.npy", content); }
};

TEST_F(PixelArrays, KeepFloatsAndNormaliseBytes) {
  std::vector<float> values(24);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) - 7.5F;
  pixels(npy_file<float>("<f4", "(2, 3, 2, 2)", values));
  labels(npy_file<int32_t>("<i4", "(2,)", {2, 0}));
  const Fields fields = open().train->read({1, 0}, 0);
  EXPECT_EQ(list(fields.at("labels")), (std::vector<int64_t>{0, 2}));
  const at::Tensor expected = at::from_blob(values.data(), {2, 3, 2, 2}, at::kFloat);
  EXPECT_TRUE(at::equal(fields.at("pixel_values")[0], expected[1]));
  EXPECT_TRUE(at::equal(fields.at("pixel_values")[1], expected[0]));
  pixels(npy_file<uint8_t>("|u1", "(2, 3, 1, 2)", {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}));
  const auto train = open().train;
  const at::Tensor bytes = train->read({0, 1}, 0).at("pixel_values");
  EXPECT_NEAR(bytes.mean().item<float>(), 0, 1e-5);
  EXPECT_NEAR(bytes.pow(2).mean().item<float>(), 1, 1e-4);
  std::filesystem::resize_file(folder_.path("pixel_values.npy"), 20);
  expect_error([&] { train->read({0}, 0); }, {"pixel_values.npy: the file was truncated while it was in use"});
}

TEST_F(PixelArrays, RefuseBadFiles) {
  refuse({"pixel_values.npy", "cannot open"});
  pixels(npy_file<uint8_t>("|u1", "(2, 3, 1, 1)", {1, 2, 3, 4, 5, 6}));
  refuse({"labels.npy", "cannot open"});
  labels(npy_file<int32_t>("<i4", "(2,)", {0, 1}));
  EXPECT_NO_THROW(open());
  model_.channels = 4;
  refuse({"pixel_values.npy", "3 channels", "model.channels is 4"});
  model_.channels = 3;
  labels(npy_file<int32_t>("<i4", "(3,)", {0, 1, 0}));
  refuse({"labels.npy", "(3,)", "(2, 3, 1, 1)", "(2,) is expected"});
  labels(npy_file<int32_t>("<i4", "(2, 1)", {0, 1}));
  refuse({"labels.npy", "(2, 1)"});
  labels(npy_file<float>("<f4", "(2,)", {0, 1}));
  refuse({"labels.npy", "float32"});
  labels(npy_file<int32_t>("<i4", "(2,)", {0, -1}));
  refuse({"picture 1 is -1"});
  labels(npy_file<int32_t>("<i4", "(2,)", {3, 0}));
  refuse({"picture 0 is 3", "model.classes is 3"});
  labels(npy_file<int32_t>("<i4", "(2,)", {0, 1}));
  pixels(npy_file<uint8_t>("|u1", "(2, 3)", {1, 2, 3, 4, 5, 6}));
  refuse({"pixel_values.npy", "(2, 3)", "four dimensions"});
  pixels(npy_file<int32_t>("<i4", "(2, 3, 1, 1)", {1, 2, 3, 4, 5, 6}));
  refuse({"pixel_values.npy", "int32", "uint8"});
  pixels(npy_file<uint8_t>("|u1", "(0, 3, 1, 1)", {}));
  refuse({"pixel_values.npy", "no picture"});
  pixels(npy_file<float>("<f4", "(2, 3, 1, 1)", {1, 2, 3, 4, std::nanf(""), 6}));
  expect_error([&] { open().train->read({1}, 0); }, {"pixel_values.npy", "picture 1", "not finite"});
  EXPECT_NO_THROW(open().train->read({0}, 0));
}

TEST_F(PixelArrays, HoldOutAFolderOfTheirOwn) {
  pixels(npy_file<uint8_t>("|u1", "(4, 1, 1, 2)", {0, 0, 50, 50, 100, 100, 150, 150}));
  labels(npy_file<int32_t>("<i4", "(4,)", {0, 2, 1, 2}));
  data_.held_out = 0.25;
  EXPECT_EQ(open().train->size(), 3);
  std::filesystem::create_directory(folder_.path("held_out"));
  folder_.write("held_out/pixel_values.npy", npy_file<uint8_t>("|u1", "(2, 1, 1, 2)", {10, 10, 20, 20}));
  refuse({"held_out/labels.npy"});
  folder_.write("held_out/labels.npy", npy_file<int32_t>("<i4", "(2,)", {1, 0}));
  EXPECT_EQ(all_labels(*open().held_out), (std::vector<int64_t>{1, 0}));
  EXPECT_EQ(open().train->size(), 4);
  // Normalised as the pictures to train on, whose mean is 75 and deviation 55.9.
  const at::Tensor first = open().held_out->read({0}, kEvaluation).at("pixel_values");
  EXPECT_NEAR(first[0][0][0][0].item<float>(), (10 - 75) / std::sqrt(3125.0), 1e-4);
  data_.held_out = 0;
  EXPECT_EQ(open().held_out, nullptr);
  EXPECT_EQ(open().train->size(), 4);
}

TEST_F(PixelArrays, NameTheirClasses) {
  EXPECT_TRUE(class_names(data_).empty());
  folder_.write("classes.txt", "ant\nbig bee\n");
  EXPECT_EQ(class_names(data_), (std::vector<std::string>{"ant", "big bee"}));
  folder_.write("classes.txt", "ant\n\nbee");
  EXPECT_EQ(class_names(data_), (std::vector<std::string>{"ant", "", "bee"}));
  data_.arrays = "";
  EXPECT_TRUE(class_names(data_).empty());
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
