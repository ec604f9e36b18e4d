// Tests pictures as raw pixels in IDX, CIFAR-10 and NumPy files, and damaged files.
#include "twobp/data/images/pixel_array.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <zlib.h>

#include <gtest/gtest.h>

#include "image_data.h"
#include "image_files.h"
#include "twobp/core/check.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::all_labels;
using test::cifar_file;
using test::expect_error;
using test::idx_file;
using test::ImageData;
using test::list;
using test::npy_file;

// ---- IDX

class Idx : public ImageData {
 protected:
  Idx() {
    data_.idx = folder_.path("");
    model_.channels = 1;
  }
  void write(const std::string& part, const std::vector<uint8_t>& labels, const std::string& ending = "") const {
    std::vector<uint8_t> pixels;
    for (size_t i = 0; i < labels.size(); ++i) pixels.insert(pixels.end(), 6, static_cast<uint8_t>(50 * i));
    const auto count = static_cast<uint32_t>(labels.size());
    save(part + "-images-idx3-ubyte" + ending, idx_file({count, 2, 3}, pixels));
    save(part + "-labels-idx1-ubyte" + ending, idx_file({count}, labels));
  }
  void save(const std::string& name, const std::string& content) const {
    if (name.substr(name.size() - 3) != ".gz") {
      folder_.write(name, content);
      return;
    }
    gzFile file = ::gzopen(folder_.path(name).c_str(), "wb");
    ::gzwrite(file, content.data(), static_cast<unsigned>(content.size()));
    ::gzclose(file);
  }
  void overwrite(const std::string& content) const { folder_.write("train-images-idx3-ubyte", content); }
  std::string images() const { return folder_.path("train-images-idx3-ubyte"); }
};

TEST_F(Idx, ReadsPicturesAndLabelsPlainOrGzipped) {
  for (const char* ending : {"", ".gz"}) {
    std::filesystem::remove_all(folder_.path(""));
    std::filesystem::create_directory(folder_.path(""));
    write("train", {0, 2, 1, 2}, ending);
    data_.mean = {0};
    data_.std = {1};
    const DataSplit split = open();
    EXPECT_EQ(split.held_out, nullptr);
    EXPECT_EQ(all_labels(*split.train), (std::vector<int64_t>{0, 2, 1, 2}));
    const at::Tensor images = split.train->read({3, 1}, 0).at("pixel_values");
    EXPECT_EQ(images.sizes(), (std::vector<int64_t>{2, 1, 2, 3}));
    EXPECT_NEAR(images[0].mean().item<float>(), 150 / 255.0, 1e-6);
    EXPECT_NEAR(images[1].mean().item<float>(), 50 / 255.0, 1e-6);
  }
}

TEST_F(Idx, HoldsOutTheTestFiles) {
  write("train", {0, 2, 1, 2});
  write("t10k", {1, 0});
  data_.held_out = 0.25;
  EXPECT_EQ(all_labels(*open().held_out), (std::vector<int64_t>{1, 0}));
  EXPECT_EQ(open().train->size(), 4);
  data_.held_out = 0;
  EXPECT_EQ(open().held_out, nullptr);
  std::filesystem::remove(folder_.path("t10k-images-idx3-ubyte"));
  data_.held_out = 0.25;
  EXPECT_EQ(open().train->size(), 3);  // then a part of the training files is held out
}

TEST_F(Idx, MeasuresMeanAndDeviation) {
  write("train", {0, 2, 1, 2});
  const at::Tensor images = open().train->read({0, 1, 2, 3}, 0).at("pixel_values");
  EXPECT_NEAR(images.mean().item<float>(), 0, 1e-5);
  EXPECT_NEAR(images.pow(2).mean().item<float>(), 1, 1e-5);
  model_.channels = 3;  // grey for each channel
  EXPECT_EQ(open().train->read({0}, 0).at("pixel_values").sizes(), (std::vector<int64_t>{1, 3, 2, 3}));
  data_.image_size = 5;
  EXPECT_EQ(open().train->read({0}, 0).at("pixel_values").sizes(), (std::vector<int64_t>{1, 3, 5, 5}));
}

TEST_F(Idx, RefusesBadFiles) {
  refuse({"data.idx", "no train-images-idx3-ubyte"});
  write("train", {0, 2, 1});
  EXPECT_NO_THROW(open());
  model_.classes = 2;
  refuse({"picture 1 is 2", "model.classes is 2", "0 to 1", "new model, set model.classes to 3", "model.from"});
  model_.classes = 3;
  folder_.write("train-labels-idx1-ubyte", idx_file({2}, {0, 1}));
  refuse({"train-labels-idx1-ubyte", "2 labels", "3 pictures"});
  folder_.write("train-labels-idx1-ubyte", idx_file({3}, {1, 1, 1}));
  refuse({"all 3 labels are 1"});
  folder_.write("train-labels-idx1-ubyte", idx_file({1, 3}, {1, 1, 1}));
  refuse({"train-labels-idx1-ubyte", "2 dimensions, but 1"});
  std::filesystem::remove(folder_.path("train-labels-idx1-ubyte"));
  refuse({"no train-labels-idx1-ubyte"});
  write("train", {0, 2, 1});
  std::string file = idx_file({3, 2, 3}, std::vector<uint8_t>(18));
  overwrite(file.substr(0, 33));
  refuse({images(), "truncated", "(3, 2, 3) needs 18 bytes, but 17"});
  overwrite(file + "x");
  refuse({images(), "more bytes follow than the 18"});
  overwrite("");
  refuse({images(), "truncated"});
  file[2] = 0xd;
  overwrite(file);
  refuse({images(), "type 13"});
  overwrite("PK\x03\x04 is a zip file, and so no IDX");
  refuse({images(), "not an IDX file"});
  overwrite(idx_file({0, 2, 3}, {}));
  refuse({images(), "dimension 0 is 0"});
  overwrite(idx_file({0xffffffff, 0xffffffff, 0xffffffff}, {1}));
  refuse({images(), "damaged"});
  overwrite(idx_file({8000, 1000, 1000}, {1}));  // 8 GB, which must not be allocated
  refuse({images(), "truncated"});
  model_.channels = 2;
  write("train", {0, 2, 1});
  EXPECT_NO_THROW(open());
}

TEST_F(Idx, RefusesEveryTruncationOfPlainAndGzippedFiles) {
  for (const char* ending : {"", ".gz"}) {
    std::filesystem::remove_all(folder_.path(""));
    std::filesystem::create_directory(folder_.path(""));
    write("train", {0, 2, 1}, ending);
    const std::string name = std::string("train-images-idx3-ubyte") + ending;
    std::ifstream in(folder_.path(name), std::ios::binary);
    const std::string whole{std::istreambuf_iterator<char>(in), {}};
    for (size_t size = 0; size < whole.size(); ++size) {
      SCOPED_TRACE(size);
      folder_.write(name, whole.substr(0, size));
      refuse({name});
    }
  }
}

TEST_F(Idx, SurvivesRandomDamage) {
  write("train", {0, 2, 1}, ".gz");
  const std::string name = "train-images-idx3-ubyte.gz";
  std::ifstream in(folder_.path(name), std::ios::binary);
  const std::string whole{std::istreambuf_iterator<char>(in), {}};
  std::mt19937 random(1);
  for (int i = 0; i < 1500; ++i) {
    std::string file = i % 2 == 0 ? whole : idx_file({3, 2, 3}, std::vector<uint8_t>(18));
    for (unsigned c = 0; c <= random() % 3; ++c) file[random() % file.size()] = static_cast<char>(random());
    folder_.write(name, file);
    try {
      EXPECT_EQ(open().train->read({2}, 0).at("pixel_values").size(0), 1);
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("train-"), std::string::npos) << error.what();
    }
  }
}

// ---- CIFAR-10

class Cifar : public ImageData {
 protected:
  Cifar() {
    data_.cifar = folder_.path("");
    model_.classes = 10;
    data_.mean = {0};
    data_.std = {1};
  }
};

TEST_F(Cifar, ReadsBatchesInOrderAndHoldsOutTheTestBatch) {
  folder_.write("data_batch_2.bin", cifar_file({5, 5}));
  folder_.write("data_batch_1.bin", cifar_file({9, 0, 1}));
  folder_.write("test_batch.bin", cifar_file({3, 2}));
  data_.held_out = 0.1;
  const DataSplit split = open();
  EXPECT_EQ(all_labels(*split.train), (std::vector<int64_t>{9, 0, 1, 5, 5}));
  EXPECT_EQ(all_labels(*split.held_out), (std::vector<int64_t>{3, 2}));
  const at::Tensor images = split.train->read({2}, 0).at("pixel_values");
  EXPECT_EQ(images.sizes(), (std::vector<int64_t>{1, 3, 32, 32}));
  const at::Tensor means = images.mean({0, 2, 3}) * 255;
  EXPECT_TRUE(at::allclose(means, at::tensor({2.0F, 4.0F, 6.0F}), 1e-4));
  std::filesystem::remove(folder_.path("test_batch.bin"));
  EXPECT_EQ(open().held_out->size(), 1);
}

TEST_F(Cifar, RefusesBadFiles) {
  refuse({"data.cifar", "no file matches"});
  folder_.write("data_batch_1.bin", cifar_file({1, 2}).substr(1));
  refuse({"data_batch_1.bin", "6145 bytes", "3073", "truncated"});
  folder_.write("data_batch_1.bin", "");
  refuse({"data_batch_1.bin", "0 bytes"});
  folder_.write("data_batch_1.bin", cifar_file({1, 10}));
  refuse({"data_batch_1.bin", "record 1 has label 10"});
  folder_.write("data_batch_1.bin", cifar_file({1, 2}));
  model_.channels = 1;
  refuse({"data_batch_1.bin", "3 channels", "model.channels is 1", "for model.from, give pictures of 1 channel"});
  model_.channels = 3;
  model_.classes = 2;
  refuse({"picture 1 is 2", "model.classes is 2"});
}

// ---- arrays

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

}  // namespace
}  // namespace twobp::TWOBP_FILE
