// Tests data sets, the held-out part, the order of an epoch, the cut into micro-batches, and bad data.
#include "twobp/data/data.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <map>
#include <numeric>

#include <gtest/gtest.h>

#include "tests/train/helpers.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_error;
using test::npy_file;
using test::TempFolder;

std::vector<int64_t> list(const at::Tensor& tensor) {
  const auto* data = tensor.data_ptr<int64_t>();
  return {data, data + tensor.numel()};
}

std::vector<int64_t> codes(const std::string& text) {
  return {text.begin(), text.end()};
}

DataConfig text_config(const std::string& pattern, int64_t sequence, double held_out = 0) {
  DataConfig config;
  config.text = pattern;
  config.sequence = sequence;
  config.held_out = held_out;
  return config;
}

ModelInput vocab(int64_t size) {
  ModelInput model;
  model.vocab = size;
  return model;
}

void refuse(const DataConfig& config, const ModelInput& model, const std::vector<std::string>& parts) {
  expect_error([&] { open_data(config, model, 1); }, parts);
}

// ---- text

TEST(TextData, CutsSortedFilesIntoShiftedWindows) {
  const TempFolder folder;
  folder.write("b.txt", "ghij");
  folder.write("a.txt", "abcdef");
  folder.write("c.dat", "never read");
  const DataSplit split = open_data(text_config(folder.path("*.txt"), 3), ModelInput{}, 1);
  EXPECT_EQ(split.held_out, nullptr);
  ASSERT_EQ(split.train->size(), 3);  // 10 bytes make 3 windows of 3, and the last target
  const Fields fields = split.train->read({2, 0, 1}, 0);
  EXPECT_EQ(fields.at("input_ids").sizes(), (std::vector<int64_t>{3, 3}));
  EXPECT_EQ(list(fields.at("input_ids")), codes("ghiabcdef"));
  EXPECT_EQ(list(fields.at("labels")), codes("hijbcdefg"));
}

TEST(TextData, ReadsBytesAboveAsciiAsTokens128To255) {
  const TempFolder folder;
  const std::string path = folder.write("a.txt", "\xc3\xa9\x01z");
  const Fields fields = open_data(text_config(path, 3), ModelInput{}, 1).train->read({0}, 0);
  EXPECT_EQ(list(fields.at("input_ids")), (std::vector<int64_t>{0xc3, 0xa9, 1}));
  EXPECT_EQ(list(fields.at("labels")), (std::vector<int64_t>{0xa9, 1, 'z'}));
}

// What is no text, with what the error says.
TEST(TextData, RefusesWhatIsNoText) {
  const TempFolder folder;
  const std::string rest(40, ' ');
  const auto utf16 = [](const std::string& text) {
    std::string out;
    for (const char c : text) out += {c, '\0'};
    return out;
  };
  const std::vector<std::pair<std::string, std::string>> all = {
      {"\xef\xbb\xbf" + rest, "begins with a byte order mark: remove its first three bytes"},
      {"\x1f\x8b\x08" + rest, "compressed by gzip: decompress it"},
      {"\x28\xb5\x2f\xfd" + rest, "compressed by zstd: decompress it"},
      {std::string("\xfd\x37zXZ\0", 6) + rest, "compressed by xz: decompress it"},
      {"BZh91AY&SY" + rest, "compressed by bzip2: decompress it"},
      {"\xff\xfe" + utf16("hello"), "UTF-16 or UTF-32: convert it to UTF-8"},
      {utf16("hello"), "byte 1 is zero"},
      {"caf\xe9 " + rest, "byte 3 is not UTF-8"},
      {"PAR1" + rest, "is a parquet file: make arrays of it by scripts/texts_to_arrays.py"},
      {"\x93NUMPY" + rest, "is a NumPy file: name its folder in data.arrays"},
      {std::string(1 << 20, 'x') + "\xc3", "byte 1048576 is not UTF-8"},
      {std::string((1 << 20) - 1, 'x') + std::string("\0yz", 3), "byte 1048575 is zero"}};
  for (const auto& [bytes, message] : all) {
    refuse(text_config(folder.write("a.txt", bytes), 3), ModelInput{}, {"a.txt", message});
  }
  for (const char* name : {"a.json", "a.JSON", "a.jsonl", "a.ndjson", "a.Parquet", "a.csv", "a.TSV"})
    refuse(text_config(folder.write(name, R"({"text": "hello"})"), 3), ModelInput{}, {name, "texts_to_arrays.py"});
  // A character may lie across two blocks that are read.
  const std::string across = std::string((1 << 20) - 1, 'x') + "\xc3\xa9z";
  EXPECT_EQ(open_data(text_config(folder.write("b.txt", across), 3), ModelInput{}, 1).train->size(), 349525);
}

TEST(TextData, ReadsANameWithGlobCharactersAsItIs) {
  const TempFolder folder;
  EXPECT_EQ(open_data(text_config(folder.write("a[1].txt", "abcd"), 3), ModelInput{}, 1).train->size(), 1);
}

TEST(TextData, SkipsFoldersAndEmptyFilesAmongTheMatches) {
  const TempFolder folder;
  folder.write("a.txt", "abc");
  folder.write("b.txt", "");
  folder.write("c.txt", "def");
  std::filesystem::create_directory(folder.path("d.txt"));
  const DataSplit split = open_data(text_config(folder.path("*.txt"), 5), ModelInput{}, 1);
  EXPECT_EQ(list(split.train->read({0}, 0).at("input_ids")), codes("abcde"));
}

TEST(TextData, RefusesBadInput) {
  const TempFolder folder;
  const ModelInput model;
  refuse(text_config(folder.path("none.txt"), 3), model, {"data.text", "no file matches", "none.txt"});
  refuse(text_config(folder.path("none/*.txt"), 3), model, {"no file matches"});
  refuse(text_config(folder.path(""), 3), model, {"a folder", "name the files"});
  refuse(text_config(folder.write("empty.txt", ""), 3), model,
         {"empty.txt", "0 bytes", "too little text", "4 bytes are needed"});
  const std::string tiny = folder.write("tiny.txt", "abc");
  refuse(text_config(tiny, 3), model, {"tiny.txt", "3 bytes", "4 bytes are needed", "data.sequence (3)"});
  EXPECT_EQ(open_data(text_config(tiny, 2), model, 1).train->size(), 1);
  refuse(text_config(tiny, 2, 0.1), model, {"5 bytes are needed", "hold out", "data.held_out to 0"});
  refuse(text_config(tiny, std::numeric_limits<int64_t>::max() / 4), model, {"too little text"});
  refuse(text_config(tiny, 2), vocab(255), {"model.vocab is 255", "256"});
  expect_error([&] { open_data(text_config(tiny, 2), model, 1).train->read({1}, 0); }, {"no sample 1"});
  expect_error([&] { open_data(text_config(tiny, 2), model, 1).train->read({-1}, 0); }, {"no sample -1"});
  refuse(DataConfig{}, model, {"no data is given"});
}

// ---- held-out part

TEST(HeldOut, IsTheLastFractionAndAtLeastOne) {
  const TempFolder folder;
  std::string text(101, '\0');
  std::iota(text.begin(), text.end(), '\1');
  const std::string path = folder.write("a.txt", text);
  const auto sizes = [&](double fraction) {
    const DataSplit split = open_data(text_config(path, 5, fraction), ModelInput{}, 1);
    return std::pair{split.train->size(), split.held_out ? split.held_out->size() : 0};
  };
  EXPECT_EQ(sizes(0), (std::pair<int64_t, int64_t>{20, 0}));
  EXPECT_EQ(sizes(1e-9), (std::pair<int64_t, int64_t>{19, 1}));
  EXPECT_EQ(sizes(0.25), (std::pair<int64_t, int64_t>{15, 5}));
  EXPECT_EQ(sizes(0.999), (std::pair<int64_t, int64_t>{1, 19}));

  const DataSplit split = open_data(text_config(path, 5, 0.25), ModelInput{}, 1);
  EXPECT_EQ(list(split.train->read({14}, 0).at("input_ids"))[0], 71);
  EXPECT_EQ(list(split.held_out->read({0}, 0).at("input_ids"))[0], 76);
  EXPECT_EQ(list(split.held_out->read({4}, 0).at("input_ids"))[0], 96);
  expect_error([&] { split.train->read({15}, 0); }, {"no sample 15", "there are 15"});
  expect_error([&] { split.held_out->read({5}, 0); }, {"no sample 5"});
}

// ---- arrays

class ArrayData : public testing::Test {
 protected:
  DataConfig config(int64_t sequence = 3, double held_out = 0) const {
    DataConfig config;
    config.arrays = folder_.path("");
    config.sequence = sequence;
    config.held_out = held_out;
    return config;
  }
  void input(const std::string& content) const { folder_.write("input_ids.npy", content); }
  void labels(const std::string& content) const { folder_.write("labels.npy", content); }

  TempFolder folder_;
};

TEST_F(ArrayData, ShiftsLabelsByOne) {
  input(npy_file<uint16_t>("<u2", "(2, 3)", {1, 2, 3, 4, 5, 6}));
  labels(npy_file<int64_t>("<i8", "(2, 3)", {-100, 2, 3, 4, -100, 6}));
  const DataSplit split = open_data(config(), vocab(7), 1);
  ASSERT_EQ(split.train->size(), 2);
  const Fields fields = split.train->read({1, 0}, 0);
  EXPECT_EQ(fields.at("labels").sizes(), (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(list(fields.at("input_ids")), (std::vector<int64_t>{4, 5, 6, 1, 2, 3}));
  EXPECT_EQ(list(fields.at("labels")), (std::vector<int64_t>{-100, 6, -100, 2, 3, -100}));
  EXPECT_EQ(read_batch(*split.train, {0, 1}, 0, 2).targets, 3);
  expect_error([&] { split.train->read({2}, 0); }, {"input_ids.npy", "no sample 2"});
}

TEST_F(ArrayData, RefusesATruncatedFile) {
  input(npy_file<uint16_t>("<u2", "(2, 3)", {1, 2, 3, 4, 5, 6}));
  labels(npy_file<int64_t>("<i8", "(2, 3)", {-100, 2, 3, 4, -100, 6}));
  const DataSplit split = open_data(config(), vocab(7), 1);
  const std::string path = folder_.path("labels.npy");
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 8);
  EXPECT_EQ(list(split.train->read({0}, 0).at("labels")), (std::vector<int64_t>{2, 3, -100}));
  expect_error([&] { split.train->read({1}, 0); }, {"labels.npy: the file was truncated while it was in use"});
}

TEST_F(ArrayData, ReadsMasksOfALanguageModel) {
  input(npy_file<uint16_t>("<u2", "(2, 4)", {1, 2, 3, 4, 5, 6, 0, 0}));
  labels(npy_file<int64_t>("<i8", "(2, 4)", {1, 2, 3, 4, 5, 6, -100, -100}));
  const auto mask = [&](const std::vector<uint8_t>& values) {
    folder_.write("attention_mask.npy", npy_file<uint8_t>("|u1", "(2, 4)", values));
  };
  mask({1, 1, 1, 1, 1, 1, 0, 0});
  const Fields fields = open_data(config(4), vocab(7), 1).train->read({1}, 0);
  EXPECT_EQ(list(fields.at("labels")), (std::vector<int64_t>{6, -100, -100, -100}));
  EXPECT_EQ(list(fields.at("attention_mask")), (std::vector<int64_t>{1, 1, 0, 0}));
  mask({1, 1, 1, 1, 1, 0, 0, 0});
  refuse(config(4), vocab(7),
         {"labels.npy", "row 1, column 1", "label 6", "attention_mask.npy says is padding", "to -100"});
  mask({1, 1, 1, 1, 0, 1, 1, 1});
  refuse(config(4), vocab(7), {"labels.npy", "row 1, column 0", "label 5", "to -100"});
  mask({1, 1, 1, 1, 0, 0, 0, 0});
  refuse(config(4), vocab(7), {"attention_mask.npy", "row 1", "all are 0"});
  mask({1, 1, 1, 1, 1, 2, 0, 0});
  refuse(config(4), vocab(7), {"attention_mask.npy", "row 1, column 1", "the mask 2"});
  // There is padding on the left, and a hole. A padding position predicts the label of the first token, as in
  // transformers.
  labels(npy_file<int64_t>("<i8", "(2, 4)", {-100, -100, 3, 4, 5, -100, 1, 2}));
  mask({0, 0, 1, 1, 1, 0, 1, 1});
  const Fields left = open_data(config(4), vocab(7), 1).train->read({0, 1}, 0);
  EXPECT_EQ(list(left.at("labels")), (std::vector<int64_t>{-100, 3, 4, -100, -100, 1, 2, -100}));
  EXPECT_EQ(list(left.at("attention_mask")), (std::vector<int64_t>{0, 0, 1, 1, 1, 0, 1, 1}));
}

// A document of a sample begins where its start is its place. No label crosses into another one.
TEST_F(ArrayData, KeepsDocumentsApart) {
  input(npy_file<int32_t>("<i4", "(2, 4)", {1, 2, 3, 4, 5, 6, 7, 8}));
  labels(npy_file<int32_t>("<i4", "(2, 4)", {1, 2, 3, 4, 5, 6, 7, 8}));
  const auto starts = [&](const std::vector<uint8_t>& values) {
    folder_.write("document_starts.npy", npy_file<uint8_t>("|u1", "(2, 4)", values));
  };
  starts({0, 0, 2, 3, 0, 0, 0, 0});
  DataConfig data = config();
  data.sequence = 4;
  ModelInput model = vocab(9);
  model.documents = true;
  const DataSplit split = open_data(data, model, 1);
  const Fields fields = split.train->read({0, 1}, 0);
  EXPECT_EQ(list(fields.at("labels")), (std::vector<int64_t>{2, -100, -100, -100, 6, 7, 8, -100}));
  EXPECT_EQ(list(fields.at("document_starts")), (std::vector<int64_t>{0, 0, 2, 3, 0, 0, 0, 0}));
  EXPECT_EQ(split.train->cost(0), 2 * 2 + 1 + 1);
  EXPECT_EQ(split.train->cost(1), 4 * 4);
  refuse(data, vocab(9), {"document_starts.npy", "does not read"});
  starts({0, 0, 2, 0, 0, 0, 0, 0});
  refuse(data, model, {"document_starts.npy", "row 0, column 3", "begins at 0"});
  starts({0, 0, 4, 4, 0, 0, 0, 0});
  refuse(data, model, {"document_starts.npy", "row 0, column 2"});
}

TEST_F(ArrayData, RefusesArraysThatAreNotRead) {
  const std::string good = npy_file<int32_t>("<i4", "(2, 3)", {0, 1, 2, 3, 4, 5});
  input(good);
  labels(good);
  folder_.write("notes.txt", "");
  EXPECT_NO_THROW(open_data(config(), vocab(6), 1));
  for (const char* name :
       {"position_ids.npy", "token_type_ids.npy", "train.npy", "attention_mask.npz", "attention_mask.NPY"}) {
    folder_.write(name, good);
    refuse(config(), vocab(6), {name, "does not read this array", "input_ids.npy, labels.npy", "data.arrays"});
    std::filesystem::remove(folder_.path(name));
  }
  std::filesystem::create_symlink(folder_.path("gone.npy"), folder_.path("attention_mask.npy"));
  refuse(config(), vocab(6), {"attention_mask.npy", "cannot open"});
}

TEST_F(ArrayData, ReadsEveryIntegerType) {
  const std::vector<int64_t> expected{1, 2, 3};
  labels(npy_file<int32_t>("<i4", "(1, 3)", {1, 2, 3}));
  for (const std::string& content :
       {npy_file<uint8_t>("|u1", "(1, 3)", {1, 2, 3}), npy_file<uint16_t>("<u2", "(1, 3)", {1, 2, 3}),
        npy_file<int32_t>("<i4", "(1, 3)", {1, 2, 3}), npy_file<int64_t>("<i8", "(1, 3)", {1, 2, 3})}) {
    input(content);
    EXPECT_EQ(list(open_data(config(), vocab(4), 1).train->read({0}, 0).at("input_ids")), expected);
  }
}

TEST_F(ArrayData, FindsIdsOutsideTheVocabularyUpFront) {
  labels(npy_file<int32_t>("<i4", "(2, 3)", {0, 1, 2, 3, 4, 5}));
  input(npy_file<int32_t>("<i4", "(2, 3)", {0, 1, 2, 3, 4, 6}));
  EXPECT_NO_THROW(open_data(config(), vocab(7), 1));
  refuse(config(), vocab(6), {"input_ids.npy", "row 1, column 2", "token id 6", "vocabulary of 6"});
  input(npy_file<int32_t>("<i4", "(2, 3)", {0, -1, 2, 3, 4, 6}));
  refuse(config(), vocab(7), {"row 0, column 1", "token id -1"});
  input(npy_file<int32_t>("<i4", "(2, 3)", {0, 1, 2, -100, 4, 6}));
  refuse(config(), vocab(7), {"row 1, column 0", "token id -100"});  // only labels may be -100
  input(npy_file<int64_t>("<i8", "(2, 3)", {0, 1, 2, 3, 4, int64_t{1} << 32}));
  refuse(config(), vocab(7), {"token id 4294967296"});  // its low 32 bits are 0
  input(npy_file<int32_t>("<i4", "(2, 3)", {0, 1, 2, 3, 4, 5}));
  labels(npy_file<int32_t>("<i4", "(2, 3)", {0, 1, 2, 3, 4, -99}));
  refuse(config(), vocab(7), {"labels.npy", "row 1, column 2", "label -99", "-100"});
  labels(npy_file<int32_t>("<i4", "(2, 3)", {0, 1, 7, 3, 4, 5}));
  refuse(config(), vocab(7), {"labels.npy", "row 0, column 2", "label 7"});
}

TEST_F(ArrayData, RefusesBadFilesAndShapes) {
  const std::string good = npy_file<int32_t>("<i4", "(2, 3)", {0, 1, 2, 3, 4, 5});
  refuse(config(), vocab(9), {"input_ids.npy", "cannot open"});
  input(good);
  refuse(config(), vocab(9), {"labels.npy", "cannot open"});
  labels(good);
  EXPECT_NO_THROW(open_data(config(), vocab(9), 1));
  refuse(config(4), vocab(9), {"input_ids.npy", "(2, 3)", "data.sequence is 4", "set data.sequence to 3"});
  labels(npy_file<int32_t>("<i4", "(3, 2)", {0, 1, 2, 3, 4, 5}));
  refuse(config(), vocab(9), {"labels.npy", "(3, 2)"});
  labels(npy_file<int32_t>("<i4", "(1, 3)", {0, 1, 2}));
  refuse(config(), vocab(9), {"labels.npy", "(1, 3)", "input_ids.npy has (2, 3)"});
  labels(npy_file<float>("<f4", "(2, 3)", {0, 1, 2, 3, 4, 5}));
  refuse(config(), vocab(9), {"labels.npy", "float32"});
  labels(good.substr(0, good.size() - 4));
  refuse(config(), vocab(9), {"labels.npy", "truncated"});
  labels(npy_file<int32_t>("<i4", "(2, 3)", {1, -100, -100, 1, -100, -100}));
  refuse(config(), vocab(9), {"labels.npy", "no label is counted"});
  input(npy_file<int32_t>("<i4", "(6,)", {0, 1, 2, 3, 4, 5}));
  refuse(config(), vocab(9), {"input_ids.npy", "(6,)", "two dimensions"});
  input(npy_file<int32_t>("<i4", "(0, 3)", {}));
  refuse(config(), vocab(9), {"input_ids.npy", "no sample"});
}

TEST_F(ArrayData, RefusesToSplitOneSample) {
  input(npy_file<int32_t>("<i4", "(1, 3)", {0, 1, 2}));
  labels(npy_file<int32_t>("<i4", "(1, 3)", {0, 1, 2}));
  refuse(config(3, 0.05), vocab(9), {"only 1 sample", "data.held_out"});
}

// ---- synthetic

TEST(SyntheticData, TokensDependOnSeedAndIndexAlone) {
  DataConfig config;
  config.synthetic = "tokens";
  config.sequence = 64;
  config.held_out = 0;
  const auto data = open_data(config, vocab(100), 1).train;
  EXPECT_EQ(data->size(), 1024);
  const Fields both = data->read({5, 9}, 0);
  EXPECT_EQ(both.at("input_ids").sizes(), (std::vector<int64_t>{2, 64}));
  EXPECT_TRUE(at::equal(both.at("input_ids")[1], data->read({9}, 0).at("input_ids")[0]));
  EXPECT_TRUE(at::equal(both.at("labels"), open_data(config, vocab(100), 1).train->read({5, 9}, 0).at("labels")));
  EXPECT_FALSE(at::equal(both.at("input_ids")[0], both.at("input_ids")[1]));
  EXPECT_FALSE(at::equal(both.at("input_ids"), both.at("labels")));
  EXPECT_FALSE(
      at::equal(both.at("input_ids"), open_data(config, vocab(100), 2).train->read({5, 9}, 0).at("input_ids")));
  expect_error([&] { data->read({1024}, 0); }, {"no sample 1024"});
}

TEST(SyntheticData, TokensFillTheVocabulary) {
  DataConfig config;
  config.synthetic = "tokens";
  config.sequence = 1000;
  std::vector<int64_t> counts(3);
  const Fields fields = open_data(config, vocab(3), 1).train->read({0, 1}, 0);
  for (const char* name : {"input_ids", "labels"}) {
    for (const int64_t id : list(fields.at(name)))
      ++counts.at(static_cast<size_t>(id));  // at() throws if the id is not below vocab
  }
  for (const int64_t count : counts) EXPECT_NEAR(static_cast<double>(count), 4000.0 / 3, 150);
}

TEST(SyntheticData, VectorsHaveMean0AndVariance1) {
  DataConfig config;
  config.synthetic = "vectors";
  config.sequence = 32;
  ModelInput model;
  model.type = "mlp";
  model.kind = InputKind::kVectors;
  model.width = 48;
  const auto data = open_data(config, model, 1).train;
  const Fields fields = data->read({3, 4}, 0);
  for (const char* name : {"input", "target"}) {
    const at::Tensor& values = fields.at(name);
    EXPECT_EQ(values.sizes(), (std::vector<int64_t>{2, 32, 48}));
    EXPECT_EQ(values.scalar_type(), at::kFloat);
    EXPECT_NEAR(values.mean().item<double>(), 0, 0.1);
    EXPECT_NEAR(values.var().item<double>(), 1, 0.1);
  }
  EXPECT_FALSE(at::equal(fields.at("input"), fields.at("target")));
  EXPECT_TRUE(at::equal(fields.at("input")[1], data->read({4}, 0).at("input")[0]));

  // There are neither labels nor tokens, so samples are counted.
  const Batch batch = read_batch(*data, {0, 1, 2}, 0, 2);
  EXPECT_EQ(batch.targets, 3);
  EXPECT_EQ(batch.tokens, 3);
}

// ---- the view of a layer

TEST(Context, GivesAFieldOrAnErrorThatListsTheFields) {
  Context context;
  expect_error([&] { context.field("labels"); }, {"no fields", "\"labels\""});
  const Fields fields{{"input_ids", at::ones({2})}, {"positions", at::ones({3})}};
  context.fields = &fields;
  EXPECT_EQ(context.field("positions").numel(), 3);
  expect_error([&] { context.field("labels"); }, {"no field \"labels\"", "it has input_ids, positions"});
}

// ---- order and batches

// The order is fixed here, because it must be the same with every compiler, library and release.
TEST(EpochOrder, IsTheSameEverywhere) {
  EXPECT_EQ(epoch_order(8, true, 1, 0), (std::vector<int64_t>{5, 0, 1, 3, 7, 2, 4, 6}));
}

TEST(EpochOrder, IsAPermutationThatDependsOnSeedAndEpoch) {
  std::vector<int64_t> in_order(1000);
  std::iota(in_order.begin(), in_order.end(), 0);
  EXPECT_EQ(epoch_order(1000, false, 1, 3), in_order);
  auto shuffled = epoch_order(1000, true, 1, 3);
  EXPECT_EQ(shuffled, epoch_order(1000, true, 1, 3));
  EXPECT_NE(shuffled, epoch_order(1000, true, 1, 4));
  EXPECT_NE(shuffled, epoch_order(1000, true, 2, 3));
  EXPECT_NE(shuffled, in_order);
  std::sort(shuffled.begin(), shuffled.end());
  EXPECT_EQ(shuffled, in_order);
  EXPECT_TRUE(epoch_order(0, true, 1, 0).empty());
  EXPECT_EQ(epoch_order(1, true, 1, 0), std::vector<int64_t>{0});
}

// Each of the 6 orders of 3 samples is equally likely.
TEST(EpochOrder, IsUniform) {
  std::map<std::vector<int64_t>, int> counts;
  for (int64_t epoch = 0; epoch < 6000; ++epoch) ++counts[epoch_order(3, true, 7, epoch)];
  ASSERT_EQ(counts.size(), 6U);
  for (const auto& [order, count] : counts) EXPECT_NEAR(count, 1000, 120);
}

TEST(ReadBatch, CutsIntoMicroBatchesAndCounts) {
  const TempFolder folder;
  const DataSplit split = open_data(text_config(folder.write("a.txt", "abcdefghijk"), 2), ModelInput{}, 1);
  ASSERT_EQ(split.train->size(), 5);
  const Batch batch = read_batch(*split.train, {4, 0, 3, 1, 2}, 0, 2);
  ASSERT_EQ(batch.micro_batches.size(), 3U);
  EXPECT_EQ(list(batch.micro_batches[0].at("input_ids")), codes("ijab"));
  EXPECT_EQ(list(batch.micro_batches[1].at("labels")), codes("hide"));
  EXPECT_EQ(list(batch.micro_batches[2].at("input_ids")), codes("ef"));
  EXPECT_EQ(batch.micro_batches[2].at("input_ids").sizes(), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(batch.targets, 10);
  EXPECT_EQ(batch.tokens, 10);
  EXPECT_TRUE(read_batch(*split.train, {}, 0, 2).micro_batches.empty());
  expect_error([&] { read_batch(*split.train, {0}, 0, 0); }, {"micro-batches of 0"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
