// Tests the .npy reader. It reads the files that NumPy writes, and refuses everything else with a reason.
#include "twobp/files/npy.h"

#include <random>
#include <utility>

#include <gtest/gtest.h>

#include "tests/train/helpers.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_error;
using test::npy_dict;
using test::npy_file;
using test::npy_prefix;
using test::TempFolder;

class Npy : public testing::Test {
 protected:
  // Writes the file and opens it.
  NpyArray open(const std::string& content) const { return NpyArray(folder_.write("a.npy", content)); }

  void refuse(const std::string& content, const std::vector<std::string>& parts) const {
    auto all = parts;
    all.push_back(folder_.path("a.npy"));  // every message names the file
    expect_error([&] { open(content); }, all);
  }

  TempFolder folder_;
};

std::vector<double> values(const NpyArray& array) {
  return array.visit(0, array.elements(),
                     [&](const auto* data) { return std::vector<double>(data, data + array.elements()); });
}

TEST_F(Npy, ReadsEveryType) {
  const std::vector<int64_t> shape{2, 3};
  const std::vector<double> expected{1, 2, 3, 4, 5, 6};
  const auto check = [&](const NpyArray& array, NpyType type, const std::string& name) {
    EXPECT_EQ(array.type(), type);
    EXPECT_EQ(npy_type_name(array.type()), name);
    EXPECT_EQ(array.shape(), shape);
    EXPECT_EQ(array.elements(), 6);
    EXPECT_EQ(values(array), expected) << name;
  };
  check(open(npy_file<uint8_t>("|u1", "(2, 3)", {1, 2, 3, 4, 5, 6})), NpyType::kUInt8, "uint8");
  check(open(npy_file<uint8_t>("<u1", "(2, 3)", {1, 2, 3, 4, 5, 6})), NpyType::kUInt8, "uint8");
  check(open(npy_file<uint16_t>("<u2", "(2, 3)", {1, 2, 3, 4, 5, 6})), NpyType::kUInt16, "uint16");
  check(open(npy_file<int32_t>("<i4", "(2, 3)", {1, 2, 3, 4, 5, 6})), NpyType::kInt32, "int32");
  check(open(npy_file<int64_t>("<i8", "(2, 3)", {1, 2, 3, 4, 5, 6})), NpyType::kInt64, "int64");
  check(open(npy_file<float>("<f4", "(2, 3)", {1, 2, 3, 4, 5, 6})), NpyType::kFloat32, "float32");
}

TEST_F(Npy, ReadsNegativeAndLargeValues) {
  EXPECT_EQ(values(open(npy_file<int64_t>("<i8", "(2,)", {-100, int64_t{1} << 40}))),
            (std::vector<double>{-100, 0x1p40}));
  EXPECT_EQ(values(open(npy_file<uint16_t>("<u2", "(1,)", {65535}))), (std::vector<double>{65535}));
}

TEST_F(Npy, ReadsVersions1To3) {
  for (const int major : {1, 2, 3}) {
    EXPECT_EQ(values(open(npy_file<int32_t>("<i4", "(2,)", {7, -8}, major))), (std::vector<double>{7, -8})) << major;
  }
}

TEST_F(Npy, ReadsScalarsAndEmptyArrays) {
  const NpyArray scalar = open(npy_file<int32_t>("<i4", "()", {42}));
  EXPECT_TRUE(scalar.shape().empty());
  EXPECT_EQ(values(scalar), std::vector<double>{42});
  const NpyArray empty = open(npy_file<int32_t>("<i4", "(0, 5)", {}));
  EXPECT_EQ(empty.elements(), 0);
  EXPECT_EQ(empty.shape(), (std::vector<int64_t>{0, 5}));
}

TEST_F(Npy, ReadsOtherSpellingsOfTheHeader) {
  const std::string bytes = test::raw_bytes(std::vector<int32_t>{1, 2});
  EXPECT_EQ(open(npy_prefix("{\"shape\":(2,),\"fortran_order\":False,\"descr\":\"<i4\"}") + bytes).elements(), 2);
  EXPECT_EQ(open(npy_prefix("{'descr': '<i4', 'fortran_order': False, 'shape': (1, 2)}") + bytes).shape(),
            (std::vector<int64_t>{1, 2}));
}

TEST_F(Npy, StaysValidWhenMoved) {
  NpyArray first = open(npy_file<int32_t>("<i4", "(2,)", {1, 2}));
  NpyArray second = NpyArray(folder_.write("b.npy", npy_file<int32_t>("<i4", "(1,)", {9})));
  const NpyArray moved = std::move(first);
  EXPECT_EQ(values(moved), (std::vector<double>{1, 2}));
  first = std::move(second);
  EXPECT_EQ(values(first), std::vector<double>{9});
}

TEST_F(Npy, RefusesMissingAndEmptyFilesAndFolders) {
  expect_error([&] { NpyArray(folder_.path("none.npy")); }, {"none.npy", "cannot open"});
  expect_error([&] { NpyArray(folder_.path("")); }, {"folder"});
  refuse("", {"not a .npy file", "0 bytes"});
  refuse("\x93NUMPY", {"not a .npy file"});
  refuse("PK\x03\x04 this is a zip file", {"not a .npy file"});
}

TEST_F(Npy, RefusesUnknownVersions) {
  std::string content = npy_file<int32_t>("<i4", "(2,)", {1, 2});
  content[6] = 4;
  refuse(content, {"format 4.0 is unknown"});
  content[6] = 0;
  refuse(content, {"format 0.0 is unknown"});
  content[6] = 1;
  content[7] = 1;
  refuse(content, {"format 1.1 is unknown"});
}

TEST_F(Npy, RefusesEveryTruncation) {
  const std::string whole = npy_file<int32_t>("<i4", "(2, 3)", {1, 2, 3, 4, 5, 6});
  ASSERT_NO_THROW(open(whole));
  for (size_t size = 0; size < whole.size(); ++size) {
    SCOPED_TRACE(size);
    refuse(whole.substr(0, size), {});
  }
  refuse(whole.substr(0, whole.size() - 1), {"needs 24 bytes, but 23 follow", "truncated"});
  refuse(whole + '\0', {"needs 24 bytes, but 25 follow"});
}

TEST_F(Npy, RefusesWrongHeaderLengths) {
  const std::string dict = npy_dict("<i4", "(2,)");
  refuse(npy_prefix(dict, 2, 0xffffffff) + "12345678", {"claims 4294967295 bytes", "damaged"});
  refuse(npy_prefix(dict, 1, 0xffff) + "12345678", {"truncated", "claims 65535 bytes"});
  refuse(npy_prefix(dict, 1, 10) + "12345678", {"bad .npy header"});
  refuse(npy_prefix(dict, 1, 0) + "12345678", {"bad .npy header"});
}

TEST_F(Npy, RefusesShapesThatOverflow) {
  const auto with_shape = [](const std::string& shape, const std::string& descr = "<i8") {
    return npy_prefix(npy_dict(descr, shape)) + std::string(64, '\0');
  };
  refuse(with_shape("(4294967296, 4294967296)"), {"(4294967296, 4294967296)", "more bytes than 64 bits count"});
  refuse(with_shape("(2305843009213693952,)"), {"64 bits"});  // 2^61 * 8 bytes wraps to 0
  refuse(with_shape("(2305843009213693953,)"), {"64 bits"});  // ... to 8
  refuse(with_shape("(9223372036854775807,)", "|u1"), {"needs 9223372036854775807 bytes, but 64"});
  refuse(with_shape("(9223372036854775808,)"), {"does not fit into 64 bits"});   // 2^63
  refuse(with_shape("(18446744073709551624,)"), {"does not fit into 64 bits"});  // 2^64 + 8
  refuse(with_shape("(-8,)"), {"expected a dimension"});
  refuse(with_shape("(8.0,)"), {"bad .npy header"});
  std::string many = "(";
  for (int i = 0; i < 33; ++i) many += "1,";
  refuse(with_shape(many + ")"), {"32 dimensions"});
}

TEST_F(Npy, RefusesOtherLayoutsAndTypes) {
  const std::string bytes(64, '\0');
  refuse(npy_prefix(npy_dict("<i8", "(2, 4)", true)) + bytes, {"Fortran order", "ascontiguousarray"});
  refuse(npy_prefix(npy_dict(">i8", "(8,)")) + bytes, {"big-endian", "'>i8'"});
  for (const char* descr : {"<f8", "|b1", "|O", "<c8", "<U4", "|V8", "<i3", "", "i8", "=i8", "<i8 ", "<u4", "|i1"}) {
    SCOPED_TRACE(descr);
    refuse(npy_prefix(npy_dict(descr, "(8,)")) + bytes, {"not supported", "uint8, uint16, int32, int64, float32"});
  }
  refuse(npy_prefix("{'descr': [('a', '<i4')], 'fortran_order': False, 'shape': (8,), }") + bytes, {"structured"});
  refuse(npy_prefix(npy_dict("\x01\x1b[31m", "(8,)")) + bytes,
         {"'??[31m'"});  // the terminal gets no control characters
}

TEST_F(Npy, RefusesBrokenHeaders) {
  const std::string bytes = test::raw_bytes(std::vector<int32_t>{1, 2});
  for (const char* dict : {
           "",
           "{",
           "{}",
           "[]",
           "{'descr': '<i4'}",
           "{'descr': '<i4', 'fortran_order': False}",
           "{'descr': '<i4', 'shape': (2,)}",
           "{'descr': '<i4', 'fortran_order': False, 'shape': (2,}",
           "{'descr': '<i4', 'fortran_order': False, 'shape': 2}",
           "{'descr': '<i4', 'fortran_order': 0, 'shape': (2,)}",
           "{'descr': '<i4', 'fortran_order': False, 'shape': (2,), 'more': 1}",
           "{'descr': '<i4', 'fortran_order': False, 'shape': (2,)} x",
           "{'descr': '<i4', 'descr': '<i4', 'fortran_order': False, 'shape': (2,)}",
           "{'descr': '<i4 , 'fortran_order': False, 'shape': (2,)}",
           "{'descr",
           "{'descr': '<i4",
           "{'descr': '<i4' 'fortran_order': False, 'shape': (2,)}",
           "{'descr': '<i4', 'fortran_order': False, 'shape': (,2)}",
           "{'descr': '<i4', 'fortran_order': False, 'shape': (2 2)}",
           "{'descr': '<i4', 'fortran_order': False, 'shape': __import__('os')}",
       }) {
    SCOPED_TRACE(dict);
    refuse(npy_prefix(dict) + bytes, {"bad .npy header at byte"});
  }
}

TEST_F(Npy, ReadsUnalignedElements) {
  std::string dict = npy_dict("<i4", "(2,)");
  std::string content = "\x93NUMPY\x01";
  content += '\0';
  dict += std::string(2 - (10 + dict.size()) % 2, ' ');  // an even length, then one more
  dict += ' ';
  content += static_cast<char>(dict.size());
  content += '\0';
  content += dict + test::raw_bytes<int32_t>({7, -8});
  EXPECT_EQ(values(open(content)), (std::vector<double>{7, -8}));
}

// The test flips every bit of a file. A bit of an element changes that element alone. A bit in the header is refused,
// or gives an array that fills the file.
TEST_F(Npy, SurvivesEveryFlippedBit) {
  const std::string whole = npy_file<int32_t>("<i4", "(2, 3)", {1, 2, 3, 4, 5, 6});
  const size_t elements_at = whole.size() - 24;
  const std::vector<double> original = values(open(whole));
  int refused = 0;
  for (size_t bit = 0; bit < 8 * whole.size(); ++bit) {
    SCOPED_TRACE(bit);
    std::string content = whole;
    content[bit / 8] ^= static_cast<char>(1 << bit % 8);
    try {
      const NpyArray array = open(content);
      ASSERT_GE(bit / 8, size_t{6});  // the signature
      const std::vector<double> now = values(array);
      if (bit / 8 < elements_at) continue;
      ASSERT_EQ(now.size(), original.size());
      for (size_t i = 0; i < now.size(); ++i) {
        EXPECT_EQ(now[i] != original[i], i == (bit / 8 - elements_at) / 4);
      }
    } catch (const Error& error) {
      EXPECT_LT(bit / 8, elements_at);
      EXPECT_NE(std::string(error.what()).find(folder_.path("a.npy")), std::string::npos);
      ++refused;
    }
  }
  EXPECT_GT(refused, 400);
}

// A damaged file is refused with an Error, or gives an array that can be read to its end.
TEST_F(Npy, SurvivesRandomDamage) {
  const std::string whole = npy_file<int32_t>("<i4", "(2, 3)", {1, 2, 3, 4, 5, 6});
  std::mt19937 random(7);
  int accepted = 0;
  int refused = 0;
  for (int round = 0; round < 4000; ++round) {
    std::string content = whole;
    const auto changes = 1 + random() % 3;
    for (size_t i = 0; i < changes; ++i) {
      // Most changes hit the 70 bytes that have a meaning.
      const size_t at = random() % (round % 4 == 0 ? content.size() : 70);
      content[at] = round % 2 == 0 ? static_cast<char>(random()) : "0123456789(),'<>fiu: "[random() % 21];
    }
    if (round % 5 == 0) content.resize(random() % (content.size() + 1));
    try {
      const NpyArray array = open(content);
      EXPECT_EQ(values(array).size(), static_cast<size_t>(array.elements()));
      ++accepted;
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(accepted, 20);
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
