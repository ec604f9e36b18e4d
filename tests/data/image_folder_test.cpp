// Tests pictures in folders of files, held-out samples by class, and synthetic pictures.
#include "twobp/data/images/image_folder.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <set>

#include <gtest/gtest.h>

#include "image_data.h"
#include "image_files.h"
#include "twobp/data/images/class_names.h"
#include "twobp/data/subset.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::all_labels;
using test::expect_error;
using test::filled;
using test::ImageData;
using test::jpeg_file;
using test::list;
using test::picture;
using test::png_file;

// ---- folders

class Folders : public ImageData {
 protected:
  Folders() {
    data_.images = folder_.path("");
    data_.image_size = 8;
    for (const char* name : {"cat", "ant", "bee"}) std::filesystem::create_directory(folder_.path(name));
    folder_.write("cat/2.png", png_file(filled(8, 8, {255, 0, 0})));
    folder_.write("cat/1.JPG", jpeg_file(filled(8, 8, {0, 255, 0})));
    folder_.write("ant/a.jpeg", jpeg_file(filled(20, 10, {0, 0, 255})));
    folder_.write("bee/b.png", png_file(filled(8, 8, {100})));
    folder_.write("bee/notes.txt", "no picture");
    folder_.write("bee/.hidden.png", "no picture");
    folder_.write("readme.md", "no class");
  }
};

TEST_F(Folders, SortClassesAndFilesByName) {
  data_.mean = {0};
  data_.std = {1};
  const auto train = open().train;
  ASSERT_EQ(train->size(), 4);
  const Fields fields = train->read({0, 1, 2, 3}, kEvaluation);
  EXPECT_EQ(list(fields.at("labels")), (std::vector<int64_t>{0, 1, 2, 2}));
  const at::Tensor& images = fields.at("pixel_values");
  EXPECT_EQ(images.sizes(), (std::vector<int64_t>{4, 3, 8, 8}));
  EXPECT_EQ(images.scalar_type(), at::kFloat);
  const at::Tensor means = images.mean({2, 3});
  const at::Tensor expected =
      at::tensor({0.F, 0.F, 1.F, 100 / 255.F, 100 / 255.F, 100 / 255.F, 0.F, 1.F, 0.F, 1.F, 0.F, 0.F}).view({4, 3});
  EXPECT_LE((means - expected).abs().max().item<float>(), 0.01F);
  expect_error([&] { train->read({4}, 0); }, {"no sample 4"});
  expect_error([&] { train->read({-1}, 0); }, {"no sample -1"});
}

TEST_F(Folders, AreNumberedAsTheModelNamesThem) {
  const test::TempFolder model;
  model_.from = model.path("");
  const auto labels = [&](const std::string& names) {
    model.write("config.json", R"({"id2label": )" + names + "}");
    return list(open().train->read({0, 1, 2, 3}, kEvaluation).at("labels"));
  };
  EXPECT_EQ(class_names(data_, model_), (std::vector<std::string>{"ant", "bee", "cat"}));
  EXPECT_EQ(labels(R"({"0": "cat", "1": "ant", "2": "bee"})"), (std::vector<int64_t>{0, 0, 1, 2}));
  EXPECT_EQ(class_names(data_, model_), (std::vector<std::string>{"cat", "ant", "bee"}));
  for (const char* others : {R"({"0": "cat", "1": "ant", "2": "dog"})", R"({"0": "cat", "1": "ant", "3": "bee"})",
                             R"({"0": "cat", "1": "ant"})", R"({"0": "cat", "1": "ant", "2": "cat"})",
                             R"(["cat", "ant", "bee"])", R"({"0": "cat", "1": "ant", "2": 2})"}) {
    EXPECT_EQ(labels(others), (std::vector<int64_t>{0, 1, 2, 2})) << others;
  }
  data_.images = "";
  EXPECT_TRUE(class_names(data_, model_).empty());
}

TEST_F(Folders, UseTheMeanOfImageNetByDefault) {
  const at::Tensor green = open().train->read({2}, kEvaluation).at("pixel_values").mean({0, 2, 3});
  EXPECT_NEAR(green[0].item<float>(), -0.485 / 0.229, 0.03);
  EXPECT_NEAR(green[1].item<float>(), (1 - 0.456) / 0.224, 0.03);
  EXPECT_NEAR(green[2].item<float>(), -0.406 / 0.225, 0.03);
  data_.image_size = 0;
  EXPECT_EQ(open().train->read({2}, kEvaluation).at("pixel_values").size(3), 224);
}

TEST_F(Folders, VaryTrainingPicturesByEpochButNotEvaluations) {
  folder_.write("ant/a.jpeg", jpeg_file(picture(60, 90)));
  const auto train = open().train;
  const auto pixels = [&](int64_t epoch) { return train->read({0}, epoch).at("pixel_values"); };
  EXPECT_TRUE(at::equal(pixels(0), pixels(0)));
  EXPECT_FALSE(at::equal(pixels(0), pixels(1)));
  EXPECT_TRUE(at::equal(pixels(kEvaluation), pixels(kEvaluation)));
  EXPECT_TRUE(at::equal(pixels(3), open_images(data_, model_, 1).train->read({0}, 3).at("pixel_values")));
  EXPECT_FALSE(at::equal(pixels(3), open_images(data_, model_, 2).train->read({0}, 3).at("pixel_values")));
}

// A JPEG that is much larger than the result is decoded at a fraction of its size. The result is about the same.
TEST_F(Folders, DecodeLargeJpegsAsIfInFull) {
  folder_.write("ant/a.jpeg", jpeg_file(picture(300, 500)));
  folder_.write("bee/b.png", png_file(picture(300, 500)));
  data_.mean = {0};
  data_.std = {1};
  const ImageFolder whole(folder_.path(""), class_folders(folder_.path("")), 3,
                          ImageTransform(ImageOptions{3, 8, 8, Crop::kResized, 0, false, {}, {}}), 1);
  const at::Tensor evaluated = whole.read({0, 1}, kEvaluation).at("pixel_values");
  EXPECT_LE((evaluated[0] - evaluated[1]).abs().max().item<float>(), 0.03F);
  data_.crop = "none";  // training and evaluation see the same part
  const auto train = open().train;
  const at::Tensor reduced = train->read({0}, 0).at("pixel_values");
  EXPECT_LE((reduced - train->read({0}, kEvaluation).at("pixel_values")).abs().max().item<float>(), 0.03F);
}

TEST_F(Folders, GiveGreyPicturesToGreyModels) {
  model_.channels = 1;
  data_.mean = {0};
  data_.std = {1};
  const at::Tensor images = open().train->read({1}, kEvaluation).at("pixel_values");
  EXPECT_EQ(images.sizes(), (std::vector<int64_t>{1, 1, 8, 8}));
  EXPECT_NEAR(images.mean().item<float>(), 100 / 255.0, 1e-4);
  model_.channels = 2;
  refuse({"model.channels is 2", "1 (grey) or 3"});
}

TEST_F(Folders, RefuseBadFolders) {
  model_.classes = 4;
  refuse({"3 sub-folders", "ant to cat", "model.classes is 4", "set model.classes to 3", "num_labels=3"});
  model_.classes = 3;
  folder_.write("bee/empty.png", "");
  refuse({"bee/empty.png", "empty"});
  folder_.write("bee/empty.png", "GIF89a");
  refuse({"bee/empty.png", "neither a JPEG nor a PNG"});
  // Only the pixels are damaged. Reading them finds it.
  const std::string png = png_file(picture(64, 64));
  folder_.write("bee/empty.png", png.substr(0, png.size() / 2));
  const auto train = open().train;
  expect_error([&] { train->read({2}, 0); }, {"bee/empty.png", "damaged PNG"});
  std::filesystem::remove_all(folder_.path("bee/empty.png"));
  std::filesystem::remove(folder_.path("bee/b.png"));
  refuse({"bee has no .jpg, .jpeg or .png"});
  std::filesystem::remove_all(folder_.path("bee"));
  std::filesystem::remove_all(folder_.path("ant"));
  refuse({"1 sub-folder (cat)", "two or more"});
  std::filesystem::remove_all(folder_.path("cat"));
  refuse({"0 sub-folders"});
  data_.images = folder_.path("none");
  refuse({"none", "cannot read the folder"});
}

TEST_F(Folders, NameThePicturesThatAreNotRead) {
  std::filesystem::remove(folder_.path("bee/notes.txt"));
  EXPECT_EQ(pictures_not_read(folder_.path("")), "");
  folder_.write("cat/3.webp", "RIFF");
  const std::string one = pictures_not_read(folder_.path(""));
  EXPECT_NE(one.find("1 entry of"), std::string::npos) << one;
  EXPECT_NE(one.find("is not read: cat/3.webp: "), std::string::npos) << one;
  std::filesystem::create_directory(folder_.path("ant/more"));
  folder_.write("ant/more/b.png", png_file(filled(8, 8, {1})));
  folder_.write("loose.png", png_file(filled(8, 8, {1})));
  folder_.write("cat/4.bmp", "BM");
  folder_.write("cat/5.gif", "GIF89a");
  const std::string five = pictures_not_read(folder_.path(""));
  EXPECT_NE(five.find("5 entries of"), std::string::npos) << five;
  EXPECT_NE(five.find("are not read: loose.png, ant/more/, cat/3.webp and 2 others: "), std::string::npos) << five;
  std::filesystem::remove(folder_.path("ant/a.jpeg"));
  refuse({"ant has no .jpg, .jpeg or .png", "(but more/)", "converted"});
}

TEST_F(Folders, ReportAPictureThatVanishes) {
  const auto train = open().train;
  std::filesystem::remove(folder_.path("ant/a.jpeg"));
  expect_error([&] { train->read({0}, 0); }, {"ant/a.jpeg", "cannot open"});
}

// ---- held-out parts

class Labelled : public Dataset {
 public:
  explicit Labelled(std::vector<int64_t> labels) : labels_(std::move(labels)) {}
  int64_t size() const override { return static_cast<int64_t>(labels_.size()); }
  Fields read(const std::vector<int64_t>& indices, int64_t epoch) const override {
    at::Tensor out = at::empty({static_cast<int64_t>(indices.size())}, at::kLong);
    at::Tensor numbers = at::tensor(indices, at::kLong);
    for (size_t i = 0; i < indices.size(); ++i)
      out.data_ptr<int64_t>()[i] = labels_.at(static_cast<size_t>(indices[i]));
    return {{"labels", out}, {"number", numbers}, {"epoch", at::full({1}, epoch, at::kLong)}};
  }
  const std::vector<int64_t>& labels() const { return labels_; }

 private:
  std::vector<int64_t> labels_;
};

std::set<int64_t> numbers(const Dataset& data) {
  std::set<int64_t> out;
  for (int64_t i = 0; i < data.size(); ++i) out.insert(list(data.read({i}, 0).at("number"))[0]);
  return out;
}

TEST(HoldOutByClass, TakesItsPartOfEveryClass) {
  std::vector<int64_t> labels(100, 0);  // sorted by class, as folders are
  labels.insert(labels.end(), 60, 1);
  labels.insert(labels.end(), 40, 2);
  const auto whole = std::make_shared<Labelled>(labels);
  const DataSplit split = hold_out_by_class(whole, labels, 0.1, 1);
  EXPECT_EQ(split.train->size(), 180);
  EXPECT_EQ(split.held_out->size(), 20);
  std::map<int64_t, int> counts;
  const std::vector<int64_t> held_out = all_labels(*split.held_out);
  for (const int64_t label : held_out) ++counts[label];
  EXPECT_EQ(counts, (std::map<int64_t, int>{{0, 10}, {1, 6}, {2, 4}}));
  // The first held-out batches contain all classes.
  EXPECT_FALSE(std::is_sorted(held_out.begin(), held_out.end()));
  std::set<int64_t> both = numbers(*split.train);
  both.merge(numbers(*split.held_out));
  EXPECT_EQ(both.size(), 200U);
  EXPECT_EQ(numbers(*split.held_out), numbers(*hold_out_by_class(whole, labels, 0.1, 1).held_out));
  EXPECT_NE(numbers(*split.held_out), numbers(*hold_out_by_class(whole, labels, 0.1, 2).held_out));
  expect_error([&] { split.train->read({180}, 0); }, {"no sample 180", "there are 180"});
  expect_error([&] { split.held_out->read({-1}, 0); }, {"no sample -1"});
  EXPECT_EQ(list(split.train->read({0}, 7).at("epoch"))[0], 7);
}

TEST(HoldOutByClass, LeavesASampleOfEachSmallClass) {
  const auto sizes = [](const std::vector<int64_t>& labels, double fraction) {
    const DataSplit split = hold_out_by_class(std::make_shared<Labelled>(labels), labels, fraction, 3);
    return std::pair{split.train->size(), split.held_out ? split.held_out->size() : 0};
  };
  EXPECT_EQ(sizes({0, 1, 2}, 0), (std::pair<int64_t, int64_t>{3, 0}));
  EXPECT_EQ(sizes({0, 1, 1}, 1e-9), (std::pair<int64_t, int64_t>{2, 1}));
  // One sample of each class is left.
  EXPECT_EQ(sizes({0, 0, 1, 1, 2, 2}, 0.999), (std::pair<int64_t, int64_t>{3, 3}));
  std::vector<int64_t> many;
  for (int64_t c = 0; c < 50; ++c) many.insert(many.end(), 5, c);
  EXPECT_EQ(sizes(many, 0.1), (std::pair<int64_t, int64_t>{225, 25}));  // half a sample of each class
  const std::vector<int64_t> single = {0, 1, 2};
  expect_error([&] { hold_out_by_class(std::make_shared<Labelled>(single), single, 0.1, 1); },
               {"no class has two samples", "data.held_out"});
}

TEST_F(ImageData, MakesSyntheticPictures) {
  data_.synthetic = "images";
  data_.image_size = 9;
  model_.channels = 2;
  const auto train = open().train;
  EXPECT_EQ(train->size(), 1024);
  const Fields fields = train->read({3, 900}, 0);
  EXPECT_EQ(fields.at("pixel_values").sizes(), (std::vector<int64_t>{2, 2, 9, 9}));
  EXPECT_NEAR(fields.at("pixel_values").mean().item<float>(), 0, 0.2);
  EXPECT_TRUE(at::equal(fields.at("pixel_values")[1], train->read({900}, 5).at("pixel_values")[0]));
  std::vector<int64_t> labels = all_labels(*train);
  EXPECT_EQ(*std::min_element(labels.begin(), labels.end()), 0);
  EXPECT_EQ(*std::max_element(labels.begin(), labels.end()), 2);
  expect_error([&] { train->read({1024}, 0); }, {"no sample 1024"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
