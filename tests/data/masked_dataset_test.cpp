// Tests masked text: the choice of hidden tokens and of their replacements, which depends on seed, epoch and
// sample alone, and the sources of special tokens.
#include "twobp/data/text/masked_dataset.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <set>

#include <gtest/gtest.h>

#include "tests/train/helpers.h"
#include "twobp/data/array_dataset.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_error;
using test::npy_file;
using test::TempFolder;
using Ids = std::vector<int64_t>;

Ids list(const at::Tensor& tensor) {
  const auto* data = tensor.data_ptr<int64_t>();
  return {data, data + tensor.numel()};
}

// Sample i has the tokens i * S to i * S + S - 1 modulo `vocab`, or `only` everywhere.
class Text : public Dataset {
 public:
  Text(int64_t samples, int64_t sequence, int64_t vocab, int64_t only = -1)
      : samples_(samples), sequence_(sequence), vocab_(vocab), only_(only) {}
  int64_t size() const override { return samples_; }
  Fields read(const Ids& indices, int64_t /*epoch*/) const override {
    at::Tensor ids = at::empty({static_cast<int64_t>(indices.size()), sequence_}, at::kLong);
    for (size_t b = 0; b < indices.size(); ++b) {
      for (int64_t t = 0; t < sequence_; ++t) {
        ids[static_cast<int64_t>(b)][t] = only_ >= 0 ? only_ : (indices[b] * sequence_ + t) % vocab_;
      }
    }
    return {{"input_ids", ids}, {"labels", ids}};
  }

 private:
  int64_t samples_;
  int64_t sequence_;
  int64_t vocab_;
  int64_t only_;
};

constexpr int64_t kBegin = 100;
constexpr int64_t kEnd = 101;
constexpr int64_t kMask = 102;
constexpr int64_t kPadding = 103;

SpecialTokens special() {
  return {kBegin, kEnd, kMask, {kBegin, kEnd, kMask, kPadding}, 104};
}

MaskedDataset masked(int64_t samples, int64_t sequence, double probability = 0.15, uint64_t seed = 1) {
  return {std::make_shared<Text>(samples, sequence, 100), special(), probability, seed};
}

TEST(MaskedDataset, PutsSpecialTokensAroundTheTextAndLabelsHiddenTokens) {
  const MaskedDataset data = masked(8, 60);
  ASSERT_EQ(data.size(), 8);
  const Fields fields = data.read({5, 2}, 0);
  ASSERT_EQ(fields.at("input_ids").sizes(), (Ids{2, 62}));
  ASSERT_EQ(fields.at("labels").sizes(), (Ids{2, 62}));
  const Fields text = Text(8, 60, 100).read({5, 2}, 0);
  for (int64_t b = 0; b < 2; ++b) {
    const Ids input = list(fields.at("input_ids")[b]);
    const Ids labels = list(fields.at("labels")[b]);
    const Ids original = list(text.at("input_ids")[b]);
    EXPECT_EQ(input.front(), kBegin);
    EXPECT_EQ(input.back(), kEnd);
    EXPECT_EQ(labels.front(), -100);
    EXPECT_EQ(labels.back(), -100);
    int hidden = 0;
    for (size_t t = 1; t + 1 < input.size(); ++t) {
      if (labels[t] == -100) {
        EXPECT_EQ(input[t], original[t - 1]);
      } else {
        EXPECT_EQ(labels[t], original[t - 1]);
        ++hidden;
      }
    }
    EXPECT_EQ(hidden, 9);  // 15 % of 60
  }
  EXPECT_EQ(make_batch({fields}).targets, 18);
}

TEST(MaskedDataset, MasksEightTenthsReplacesOneKeepsOne) {
  const MaskedDataset data = masked(400, 100);
  int mask = 0;
  int other = 0;
  int same = 0;
  std::vector<int> by_position(100);
  std::set<int64_t> others;
  for (int64_t i = 0; i < data.size(); ++i) {
    const Fields fields = data.read({i}, 0);
    const Ids input = list(fields.at("input_ids"));
    const Ids labels = list(fields.at("labels"));
    for (size_t t = 1; t + 1 < input.size(); ++t) {
      if (labels[t] == -100) continue;
      ++by_position[t - 1];
      if (input[t] == kMask) {
        ++mask;
      } else if (input[t] == labels[t]) {
        ++same;
      } else {
        ++other;
        others.insert(input[t]);
        EXPECT_LT(input[t], kBegin);  // no special token replaces a word
      }
    }
  }
  const int all = mask + other + same;
  EXPECT_EQ(all, 400 * 15);
  EXPECT_NEAR(mask, 0.8 * all, 120);
  EXPECT_NEAR(other, 0.099 * all, 90);
  EXPECT_NEAR(same, 0.101 * all, 90);
  EXPECT_GT(others.size(), 95U);
  for (const int count : by_position) EXPECT_NEAR(count, 60, 35);
}

TEST(MaskedDataset, DependsOnSeedEpochAndSampleAlone) {
  const MaskedDataset data = masked(50, 40);
  const auto labels = [](const MaskedDataset& from, int64_t sample, int64_t epoch) {
    return list(from.read({sample}, epoch).at("labels"));
  };
  const Fields together = data.read({7, 3, 7}, 2);
  EXPECT_EQ(list(together.at("labels")[0]), labels(data, 7, 2));
  EXPECT_EQ(list(together.at("labels")[1]), labels(data, 3, 2));
  EXPECT_TRUE(at::equal(together.at("input_ids")[0], together.at("input_ids")[2]));
  EXPECT_EQ(labels(masked(50, 40), 7, 2), labels(data, 7, 2));
  EXPECT_NE(labels(data, 7, 3), labels(data, 7, 2));
  EXPECT_NE(labels(masked(50, 40, 0.15, 2), 7, 2), labels(data, 7, 2));
  EXPECT_EQ(labels(data, 7, kEvaluation), labels(data, 7, kEvaluation));
  EXPECT_NE(labels(data, 7, kEvaluation), labels(data, 7, 0));
}

TEST(MaskedDataset, HidesAtLeastOneAndAtMostAll) {
  for (int64_t i = 0; i < 20; ++i) {
    EXPECT_EQ(make_batch({masked(20, 1).read({i}, 0)}).targets, 1);
    EXPECT_EQ(make_batch({masked(20, 5, 1e-6).read({i}, 0)}).targets, 1);
    EXPECT_EQ(make_batch({masked(20, 5, 1).read({i}, 0)}).targets, 5);
  }
}

TEST(MaskedDataset, HidesSpecialTokensOfTheTextOnlyIfThereIsNothingElse) {
  const MaskedDataset data(std::make_shared<Text>(10, 104, 104), special(), 0.5, 1);
  for (int64_t i = 0; i < 10; ++i) {
    const Ids labels = list(data.read({i}, 0).at("labels"));
    EXPECT_EQ(std::count(labels.begin(), labels.end(), -100), 106 - 50);
    EXPECT_LT(*std::max_element(labels.begin(), labels.end()), kBegin);
  }
  const MaskedDataset unknown(std::make_shared<Text>(1, 10, 104, kPadding), special(), 0.5, 1);
  EXPECT_EQ(make_batch({unknown.read({0}, 0)}).targets, 5);
}

TEST(MaskedDataset, RefusesBadOptions) {
  for (const double probability : {0.0, -1.0, 1.01, std::nan("")}) {
    expect_error([&] { masked(1, 4, probability); }, {"data.mask_probability"});
  }
  SpecialTokens all = special();
  all.vocab = 4;
  expect_error([&] { MaskedDataset(std::make_shared<Text>(1, 4, 4), all, 0.5, 1); }, {"only special tokens"});
}

// ---- arrays

class MaskedArrays : public testing::Test {
 protected:
  MaskedArrays() {
    write("input_ids", npy_file<uint16_t>("<u2", "(2, 3)", {1, 2, 3, 4, 5, 6}));
    write("labels", npy_file<int64_t>("<i8", "(2, 3)", {9, -100, -100, -100, 5, -100}));
  }
  void write(const std::string& name, const std::string& content) const { folder_.write(name + ".npy", content); }
  ArrayDataset open() const { return {folder_.path(""), 3, 10, LabelOf::kSameToken, 2}; }
  void refuse(const std::vector<std::string>& parts) const {
    expect_error([&] { open(); }, parts);
  }

  TempFolder folder_;
};

TEST_F(MaskedArrays, KeepLabelsAtTheirOwnPosition) {
  const Fields fields = open().read({1, 0}, 0);
  EXPECT_EQ(list(fields.at("input_ids")), (Ids{4, 5, 6, 1, 2, 3}));
  EXPECT_EQ(list(fields.at("labels")), (Ids{-100, 5, -100, 9, -100, -100}));
  EXPECT_EQ(fields.size(), 2U);
  write("labels", npy_file<int64_t>("<i8", "(2, 3)", {9, -100, -100, 9, -100, -100}));
  EXPECT_EQ(make_batch({open().read({0, 1}, 0)}).targets, 2);  // column 0 counts, too
}

TEST_F(MaskedArrays, ReadMaskAndTokenTypesIfPresent) {
  write("attention_mask", npy_file<uint8_t>("|u1", "(2, 3)", {1, 1, 0, 1, 0, 0}));
  write("token_type_ids", npy_file<int32_t>("<i4", "(2, 3)", {0, 1, 1, 0, 0, 1}));
  const Fields fields = open().read({1}, 0);
  EXPECT_EQ(list(fields.at("attention_mask")), (Ids{1, 0, 0}));
  EXPECT_EQ(list(fields.at("token_type_ids")), (Ids{0, 0, 1}));
  write("position_ids", npy_file<int32_t>("<i4", "(2, 3)", {0, 1, 2, 0, 1, 2}));
  refuse({"position_ids.npy", "does not read this array", "token_type_ids.npy"});
}

TEST_F(MaskedArrays, RefuseBadMasksAndTypes) {
  write("attention_mask", npy_file<uint8_t>("|u1", "(3, 2)", {1, 1, 0, 1, 0, 0}));
  refuse({"attention_mask.npy", "(3, 2)", "(2, 3)"});
  write("attention_mask", npy_file<float>("<f4", "(2, 3)", {1, 1, 0, 1, 0, 0}));
  refuse({"attention_mask.npy", "float32"});
  write("attention_mask", npy_file<uint8_t>("|u1", "(2, 3)", {1, 1, 0, 1, 2, 0}));
  refuse({"attention_mask.npy", "row 1, column 1", "mask 2", "0 (padding) and 1"});
  write("attention_mask", npy_file<uint8_t>("|u1", "(2, 3)", {1, 1, 0, 0, 0, 0}));
  refuse({"attention_mask.npy", "row 1", "all are 0"});
  write("attention_mask", "nothing");
  refuse({"attention_mask.npy", "not a .npy file"});
  write("attention_mask", npy_file<uint8_t>("|u1", "(2, 3)", {1, 1, 0, 1, 0, 0}));
  write("token_type_ids", npy_file<int32_t>("<i4", "(2, 3)", {0, 1, 2, 0, 0, 1}));
  refuse({"token_type_ids.npy", "row 0, column 2", "token type 2", "model.token_types"});
  write("token_type_ids", npy_file<int32_t>("<i4", "(2, 3)", {0, 1, 1, 0, 0, 1}));
  EXPECT_NO_THROW(open());
  write("labels", npy_file<int64_t>("<i8", "(2, 3)", {-100, -100, -100, -100, -100, -100}));
  refuse({"labels.npy", "no label is counted"});
  write("labels", npy_file<int64_t>("<i8", "(2, 3)", {10, -100, -100, -100, -100, -100}));
  refuse({"labels.npy", "label 10", "vocabulary of 10"});
}

// ---- through the configuration

class OpenMasked : public testing::Test {
 protected:
  OpenMasked() {
    model_.type = "bert";
    model_.kind = InputKind::kMaskedTokens;
    model_.token_types = 2;
    data_.sequence = 8;
    data_.held_out = 0;
  }
  // Returns the tokens with the masked ones restored.
  static Ids original(const Fields& fields) {
    Ids out = list(fields.at("input_ids"));
    const Ids labels = list(fields.at("labels"));
    for (size_t t = 0; t < out.size(); ++t) out[t] = labels[t] == -100 ? out[t] : labels[t];
    return out;
  }

  TempFolder folder_;
  DataConfig data_;
  ModelInput model_;
};

TEST_F(OpenMasked, BytesGetFourSpecialTokens) {
  data_.text = folder_.write("a.txt", "abcdefghijklmnopqrs");
  model_.vocab = 260;
  const auto train = open_data(data_, model_, 1).train;
  ASSERT_EQ(train->size(), 3);
  EXPECT_EQ(original(train->read({1}, 0)), (Ids{256, 'g', 'h', 'i', 'j', 'k', 'l', 257}));
  data_.mask_probability = 1;
  Ids seen;
  for (int64_t epoch = 0; epoch < 20; ++epoch) {
    const Ids ids = list(open_data(data_, model_, 1).train->read({0, 1, 2}, epoch).at("input_ids"));
    seen.insert(seen.end(), ids.begin(), ids.end());
  }
  EXPECT_GT(std::count(seen.begin(), seen.end(), 258), 250);
  EXPECT_EQ(std::count(seen.begin(), seen.end(), 259), 0);
  data_.sequence = 18;
  data_.held_out = 0.5;
  expect_error([&] { open_data(data_, model_, 1); }, {"too little text", "33 bytes are needed"});
}

TEST_F(OpenMasked, TokenFilesUseTheirTokenizer) {
  data_.tokens = folder_.write("a.bin", test::raw_bytes(std::vector<uint16_t>{5, 6, 7, 5, 6, 7, 0}));
  data_.tokenizer = folder_.write("tokenizer.json", R"({"model": {"vocab": {"x": 7}}, "added_tokens": [
      {"id": 1, "content": "[CLS]", "special": true}, {"id": 2, "content": "[SEP]", "special": true},
      {"id": 3, "content": "[MASK]", "special": true}]})");
  model_.vocab = 8;
  EXPECT_EQ(original(open_data(data_, model_, 1).train->read({0}, 0)), (Ids{1, 5, 6, 7, 5, 6, 7, 2}));
  data_.held_out = 0.5;
  expect_error([&] { open_data(data_, model_, 1); }, {"too little text", "13 tokens"});
  model_.vocab = 7;
  expect_error([&] { open_data(data_, model_, 1); }, {"vocabulary of 8", "model.vocab is 7"});
}

TEST_F(OpenMasked, HidesSyntheticTokensToo) {
  data_.synthetic = "tokens";
  data_.sequence = 22;
  model_.vocab = 50;
  const Fields fields = open_data(data_, model_, 1).train->read({0, 1}, 0);
  EXPECT_EQ(fields.at("input_ids").sizes(), (Ids{2, 22}));
  const int64_t targets = make_batch({fields}).targets;
  EXPECT_GE(targets, 4);
  EXPECT_LE(targets, 6);
  model_.vocab = 4;
  expect_error([&] { open_data(data_, model_, 1); }, {"model.vocab is 4"});
}

TEST_F(OpenMasked, KeepsTheLabelsOfArraysInPlace) {
  folder_.write("input_ids.npy", npy_file<uint16_t>("<u2", "(1, 8)", {1, 2, 3, 4, 5, 6, 7, 8}));
  folder_.write("labels.npy", npy_file<int64_t>("<i8", "(1, 8)", {9, -100, -100, -100, -100, -100, -100, 7}));
  data_.arrays = folder_.path("");
  model_.vocab = 10;
  const Fields fields = open_data(data_, model_, 1).train->read({0}, 0);
  EXPECT_EQ(list(fields.at("labels")), (Ids{9, -100, -100, -100, -100, -100, -100, 7}));
  EXPECT_EQ(list(fields.at("input_ids")), (Ids{1, 2, 3, 4, 5, 6, 7, 8})) << "nothing more is masked";
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
