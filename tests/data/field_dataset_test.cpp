#include <filesystem>

#include <gtest/gtest.h>

#include "tests/train/helpers.h"
#include "twobp/data/array_dataset.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::npy_file;
using test::TempFolder;

const std::vector<FieldInput> kFields = {
    {"image", at::kFloat, {2, 1, 2}}, {"mask", at::kBool, {2, 3}}, {"label", at::kLong, {2}}};

class FieldData : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_.write("image.npy", npy_file<float>("<f4", "(3, 1, 2)", {0, 1, 2, 3, 4, 5}));
    folder_.write("mask.npy", npy_file<uint8_t>("|u1", "(3, 3)", {0, 1, 0, 1, 1, 1, 0, 0, 0}));
    folder_.write("label.npy", npy_file<uint16_t>("<u2", "(3,)", {7, 8, 65535}));
  }
  void refuse(const std::vector<std::string>& parts) const {
    test::expect_error([&] { FieldDataset(folder_.path(""), kFields); }, parts);
  }

  TempFolder folder_;
};

TEST_F(FieldData, ReadsEachFieldInItsDtype) {
  const FieldDataset data(folder_.path(""), kFields);
  ASSERT_EQ(data.size(), 3);
  const Fields fields = data.read({2, 0}, 0);
  EXPECT_TRUE(at::equal(fields.at("image"), at::tensor({4.0F, 5.0F, 0.0F, 1.0F}).view({2, 1, 2})));
  EXPECT_TRUE(at::equal(fields.at("mask"), at::tensor({0, 0, 0, 0, 1, 0}).view({2, 3}).to(at::kBool)));
  EXPECT_TRUE(at::equal(fields.at("label"), at::tensor({65535, 7}, at::kLong)));
}

TEST_F(FieldData, RefusesArraysThatDoNotFit) {
  folder_.write("mask.npy", npy_file<uint8_t>("|u1", "(3, 2)", {0, 1, 0, 1, 1, 1}));
  refuse({"mask.npy", "shape (3, 2)", "(2, 3) for a micro-batch"});
  folder_.write("mask.npy", npy_file<uint8_t>("|u1", "(2, 3)", {0, 1, 0, 1, 1, 1}));
  refuse({"mask.npy", "has 2 samples, but another array has 3"});
  folder_.write("mask.npy", npy_file<float>("<f4", "(3, 3)", std::vector<float>(9, 1)));
  refuse({"mask.npy", "holds float32", "save it as whole numbers"});
  std::filesystem::remove(folder_.path("mask.npy"));
  refuse({"mask.npy"});
  SetUp();
  folder_.write("weights.npy", npy_file<float>("<f4", "(3,)", {1, 2, 3}));
  refuse({"weights.npy", "does not read this array"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
