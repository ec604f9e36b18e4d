// Tests token files: both types, several shards, and every error in them.
#include <filesystem>
#include <fstream>
#include <limits>

#include <gtest/gtest.h>

#include "tests/train/helpers.h"
#include "twobp/data/text/token_source.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_error;
using test::raw_bytes;
using test::TempFolder;
using Ids = std::vector<int64_t>;

Ids list(const at::Tensor& tensor) {
  const auto* data = tensor.data_ptr<int64_t>();
  return {data, data + tensor.numel()};
}

class TokenFiles : public testing::Test {
 protected:
  std::shared_ptr<Dataset> open(const std::string& pattern, int64_t sequence, int64_t vocab,
                                const std::string& type = "uint16", double held_out = 0) const {
    DataConfig data;
    data.tokens = folder_.path(pattern);
    data.token_type = type;
    data.sequence = sequence;
    data.held_out = held_out;
    ModelInput model;
    model.vocab = vocab;
    return open_data(data, model, 1).train;
  }
  void refuse(const std::string& pattern, int64_t sequence, int64_t vocab, const std::vector<std::string>& parts,
              const std::string& type = "uint16", double held_out = 0) const {
    expect_error([&] { open(pattern, sequence, vocab, type, held_out); }, parts);
  }

  TempFolder folder_;
};

TEST_F(TokenFiles, GiveSamplesWithShiftedLabels) {
  folder_.write("a.bin", raw_bytes<uint16_t>({1, 2, 3, 4, 5, 6, 7, 8}));
  const auto data = open("a.bin", 3, 9);
  ASSERT_EQ(data->size(), 2);
  const Fields fields = data->read({1, 0, 1}, 0);
  EXPECT_EQ(fields.at("input_ids").sizes(), (Ids{3, 3}));
  EXPECT_EQ(list(fields.at("input_ids")), (Ids{4, 5, 6, 1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(list(fields.at("labels")), (Ids{5, 6, 7, 2, 3, 4, 5, 6, 7}));
  EXPECT_TRUE(fields.at("input_ids").is_contiguous() && fields.at("labels").is_contiguous());
  expect_error([&] { data->read({2}, 0); }, {"data.tokens", "no sample 2", "there are 2"});
  expect_error([&] { data->read({-1}, 0); }, {"no sample -1"});
}

TEST_F(TokenFiles, HoldBothTypesUpToTheirLargestNumber) {
  folder_.write("a.bin", raw_bytes<uint16_t>({0, 65535, 256}));
  EXPECT_EQ(list(open("a.bin", 2, 65536)->read({0}, 0).at("labels")), (Ids{65535, 256}));
  folder_.write("b.bin", raw_bytes<uint32_t>({0, 4294967295, 70000}));
  EXPECT_EQ(list(open("b.bin", 2, int64_t{1} << 32, "uint32")->read({0}, 0).at("labels")), (Ids{4294967295, 70000}));
}

// The shards form one long row. A sample may begin in one shard and end in the next, or in a later one.
TEST_F(TokenFiles, FormOneRowOfSortedShards) {
  folder_.write("s2.bin", raw_bytes<uint32_t>({4}));
  folder_.write("s10.bin", raw_bytes<uint32_t>({0, 1, 2, 3}));
  folder_.write("s3.bin", raw_bytes<uint32_t>({5, 6, 7, 8, 9, 10, 11}));
  folder_.write("s.txt", "never read");
  for (const int64_t sequence : {1, 2, 3, 4, 5, 11}) {
    const auto data = open("s*.bin", sequence, 12, "uint32");
    ASSERT_EQ(data->size(), 11 / sequence);
    for (int64_t i = 0; i < data->size(); ++i) {
      const Fields fields = data->read({i}, 0);
      for (int64_t t = 0; t < sequence; ++t) {
        EXPECT_EQ(list(fields.at("input_ids"))[static_cast<size_t>(t)], i * sequence + t);
        EXPECT_EQ(list(fields.at("labels"))[static_cast<size_t>(t)], i * sequence + t + 1);
      }
    }
  }
}

TEST_F(TokenFiles, RefuseBadSizes) {
  refuse("none*.bin", 2, 9, {"data.tokens: no file matches", "none*.bin"});
  refuse("", 2, 9, {"data.tokens", "a folder", "*.bin"});
  folder_.write("odd.bin", "12345");
  refuse("odd.bin", 2, 70000, {"odd.bin has 5 bytes", "no multiple of the 2 of a uint16", "truncated"});
  folder_.write("six.bin", "123456");
  EXPECT_EQ(open("six.bin", 2, 70000)->size(), 1);
  refuse("six.bin", 1, 70000, {"six.bin has 6 bytes", "no multiple of the 4 of a uint32", "data.token_type"}, "uint32");
  folder_.write("full.bin", raw_bytes<uint16_t>({1, 2, 3}));
  folder_.write("fuller.bin", "");
  refuse("full*.bin", 2, 9, {"fuller.bin is empty"});
  refuse("full.bin", 3, 9, {"data.tokens", "1 file, 3 tokens", "4 tokens are needed", "data.sequence (3)"});
  EXPECT_EQ(open("full.bin", 2, 9)->size(), 1);
  refuse("full.bin", 2, 9, {"5 tokens are needed", "hold out", "data.held_out to 0"}, "uint16", 0.1);
  refuse("full.bin", 1 << 24, 9, {"16777217 tokens are needed"});
}

TEST_F(TokenFiles, FindIdsOutsideTheVocabularyBeforeTraining) {
  folder_.write("s1.bin", raw_bytes<uint16_t>({0, 1, 2}));
  folder_.write("s2.bin", raw_bytes<uint16_t>({3, 9, 1}));
  EXPECT_NO_THROW(open("s*.bin", 2, 10));
  refuse("s*.bin", 2, 9,
         {"data.tokens", "s2.bin", "token 1 is 9", "vocabulary of 9 tokens (0 to 8)", "model.vocab",
          "data.token_type to uint32"});
  std::vector<uint32_t> many(20000, 5);  // more than a block
  many[19999] = 4000000000;
  folder_.write("b.bin", raw_bytes(many));
  refuse("b.bin", 2, 6, {"b.bin", "token 19999 is 4000000000", "data.token_type to uint16"}, "uint32");
}

// A file may change after it was opened, so ids are checked when they are read.
TEST_F(TokenFiles, CheckIdsAgainWhenRead) {
  const std::string path = folder_.write("a.bin", raw_bytes<uint16_t>({0, 1, 2, 3, 4, 5, 6}));
  folder_.write("b.bin", raw_bytes<uint16_t>({0, 1, 2, 3, 4, 5, 6}));
  const auto data = open("[ab].bin", 3, 7);
  std::fstream file(folder_.path("b.bin"), std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(4);
  file.write("\x07", 1);
  file.close();
  EXPECT_NO_THROW(data->read({0, 1}, 0));
  expect_error([&] { data->read({0, 3}, 0); }, {"b.bin", "token 2 is 7", "vocabulary of 7"});
}

TEST_F(TokenFiles, RefuseATruncatedFile) {
  folder_.write("a.bin", raw_bytes<uint16_t>({0, 1, 2, 3, 4, 5, 6}));
  folder_.write("b.bin", raw_bytes<uint16_t>({0, 1, 2, 3, 4, 5, 6}));
  const auto data = open("[ab].bin", 3, 7);
  std::filesystem::resize_file(folder_.path("b.bin"), 5);
  EXPECT_EQ(list(data->read({1}, 0).at("input_ids")), (Ids{3, 4, 5}));
  expect_error(
      [&] {
        data->read({0, 3}, 0);
      },
      {"b.bin: the file was truncated while it was in use", "it had 14 bytes", "before byte 6"});
}

TEST_F(TokenFiles, NoticeTheOtherType) {
  std::vector<uint32_t> small(100);
  for (size_t i = 0; i < small.size(); ++i) small[i] = static_cast<uint32_t>(i * 7 % 50);
  folder_.write("a.bin", raw_bytes(small));
  EXPECT_EQ(open("a.bin", 9, 50, "uint32")->size(), 11);
  refuse("a.bin", 9, 50, {"a.bin", "every second number is at most 0", "data.token_type to uint32"});
  for (uint32_t& id : small) id += 65500;  // the upper halves are 0 and 1
  folder_.write("c.bin", raw_bytes(small));
  EXPECT_EQ(open("c.bin", 9, 128256, "uint32")->size(), 11);
  refuse("c.bin", 9, 128256, {"c.bin", "every second number is at most 1", "data.token_type to uint32"});
  const std::vector<uint16_t> narrow(100, 49);
  folder_.write("b.bin", raw_bytes(narrow));
  refuse("b.bin", 9, 50, {"b.bin", "token 0 is 3211313", "data.token_type to uint16"}, "uint32");
  // Neither zeros alone nor few numbers tell the type.
  folder_.write("zeros.bin", raw_bytes(std::vector<uint16_t>(100, 0)));
  EXPECT_EQ(open("zeros.bin", 9, 50)->size(), 11);
  folder_.write("few.bin", raw_bytes<uint16_t>({1, 0, 2, 0}));
  EXPECT_EQ(open("few.bin", 3, 50)->size(), 1);
}

// Returns the 256 numbers before the tokens in the files of llm.c's scripts.
std::string llmc_header(int32_t mark, int32_t version, int32_t tokens) {
  std::vector<int32_t> header(256, 0);
  header[0] = mark;
  header[1] = version;
  header[2] = tokens;
  return raw_bytes(header);
}

TEST_F(TokenFiles, ReadFilesOfLlmc) {
  folder_.write("g1.bin", llmc_header(20240520, 1, 3) + raw_bytes<uint16_t>({1, 2, 3}));
  folder_.write("g2.bin", llmc_header(20240520, 1, 4) + raw_bytes<uint16_t>({4, 5, 6, 50256}));
  for (const char* type : {"", "uint16"}) {
    const auto data = open("g*.bin", 2, 50257, type);
    ASSERT_EQ(data->size(), 3);
    EXPECT_EQ(list(data->read({0, 1, 2}, 0).at("input_ids")), (Ids{1, 2, 3, 4, 5, 6}));
    EXPECT_EQ(list(data->read({2}, 0).at("labels")), (Ids{6, 50256}));
  }
  folder_.write("l.bin", llmc_header(20240801, 7, 3) + raw_bytes<uint32_t>({1, 128000, 3}));
  EXPECT_EQ(list(open("l.bin", 2, 128256, "")->read({0}, 0).at("input_ids")), (Ids{1, 128000}));

  refuse("g*.bin", 2, 50257, {"g1.bin", "llm.c's header for uint16", "data.token_type is uint32", "remove"}, "uint32");
  refuse("[gl]*.bin", 2, 128256, {"l.bin holds uint32 by its header", "g1.bin", "holds uint16", "one type"}, "");
  folder_.write("raw.bin", raw_bytes<uint16_t>({1, 2, 3}));
  EXPECT_EQ(open("[gr]*.bin", 2, 50257, "")->size(), 4);
  refuse("*.bin", 2, 128256, {"holds uint32"}, "");
  refuse("g2.bin", 2, 9,
         {"g2.bin", "token 3 is 50256", "vocabulary of 9", "for a new model, set model.vocab", "for model.from, give"},
         "");
}

TEST_F(TokenFiles, RefuseOtherFiles) {
  folder_.write("a.bin", test::npy_file<uint16_t>("<u2", "(3,)", {1, 2, 3}));
  refuse("a.bin", 2, 65536, {"a.bin is a NumPy file", "tofile", "data.arrays"}, "");
  const std::pair<std::string, const char*> others[] = {
      {std::string("PK\3\4", 4), "is a zip or .npz file"},
      {"\x1f\x8b\x08", "is compressed by gzip: decompress it"},
      {"\x28\xb5\x2f\xfd", "is compressed by zstd"},
      {std::string("\xfd"
                   "7zXZ\0",
                   6),
       "is compressed by xz"},
      {"PAR1", "is a parquet file: make arrays of it"},
      {"\x89HDF", "is an HDF5 file"},
      {"MMIDIDX", "is the index of Megatron's token files: give the .bin file alone"}};
  for (const auto& [mark, message] : others) {
    folder_.write("a.bin", mark + std::string(40 - mark.size(), '\0'));
    refuse("a.bin", 2, 65536, {"a.bin", message}, "");
  }
  const std::string tokens = raw_bytes<uint16_t>({1, 2, 3});
  folder_.write("a.bin", llmc_header(20240520, 1, 4) + tokens);
  refuse("a.bin", 2, 9, {"a.bin has 1030 bytes", "says 4 tokens of uint16", "1032", "truncated"}, "");
  folder_.write("a.bin", llmc_header(20240520, 1, -3) + tokens);
  refuse("a.bin", 2, 9, {"a.bin", "says -3 tokens"}, "");
  folder_.write("a.bin", llmc_header(20240520, 2, 3) + tokens);
  refuse("a.bin", 2, 9, {"a.bin", "version 2", "only version 1"}, "");
  folder_.write("a.bin", llmc_header(20240522, 1, 3) + tokens);
  refuse("a.bin", 2, 9, {"a.bin", "questions with several answers"}, "");
  folder_.write("a.bin", llmc_header(20240520, 1, 3).substr(0, 512));
  refuse("a.bin", 2, 9, {"a.bin has 512 bytes", "truncated"}, "");
}

TEST(TokenType, HasNamesAndWidths) {
  EXPECT_EQ(parse_token_type("uint16"), TokenType::kUInt16);
  EXPECT_EQ(parse_token_type("uint32"), TokenType::kUInt32);
  expect_error([] { parse_token_type("int16"); }, {"\"int16\"", "uint16 or uint32"});
  EXPECT_EQ(token_bytes(TokenType::kUInt16), 2);
  EXPECT_EQ(token_bytes(TokenType::kUInt32), 4);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
