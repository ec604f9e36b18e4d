// Tests safetensors files: written tensors come back. A damaged file is refused with an Error, or every tensor of it
// can be read to its end.
#include "twobp/files/safetensors.h"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include <gtest/gtest.h>

#include "tests/files/safetensors_files.h"
#include "tests/train/helpers.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::entry;
using test::expect_error;
using test::header;
using test::safetensors_file;
using test::TempFolder;

const std::vector<at::ScalarType> kTypes = {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong,
                                            at::kInt,    at::kShort, at::kChar, at::kByte,     at::kBool};

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         (a.numel() == 0 ||
          std::memcmp(a.contiguous().const_data_ptr(), b.contiguous().const_data_ptr(), a.nbytes()) == 0);
}

class Safetensors : public ::testing::Test {
 protected:
  SafetensorsFile open(const std::string& content) const {
    return SafetensorsFile(folder_.write("a.safetensors", content));
  }
  void refuse(const std::string& content, std::vector<std::string> parts) const {
    parts.emplace_back("a.safetensors");
    expect_error([&] { open(content); }, parts);
  }
  void refuse_header(const std::string& header, size_t data_bytes, const std::vector<std::string>& parts) const {
    SCOPED_TRACE(header.substr(0, 200));
    refuse(safetensors_file(header, std::string(data_bytes, '\1')), parts);
  }
  std::string content_of(const std::string& name) const {
    std::ifstream file(folder_.path(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }

  TempFolder folder_;
};

// The bits are random, so that NaNs with payloads are among them.
at::Tensor random_tensor(at::ScalarType type, const std::vector<int64_t>& shape, unsigned seed) {
  std::mt19937 random(seed);
  at::Tensor tensor = at::empty(shape, type);
  auto* bytes = static_cast<uint8_t*>(tensor.mutable_data_ptr());
  for (size_t i = 0; i < tensor.nbytes(); ++i) {
    bytes[i] = static_cast<uint8_t>(type == at::kBool ? random() % 2 : random());
  }
  return tensor;
}

TEST_F(Safetensors, ReturnsEveryTypeAndShapeToTheBit) {
  NamedTensors tensors;
  for (const at::ScalarType type : kTypes) {
    const std::string name = c10::toString(type);
    tensors.emplace_back(name + ".matrix", random_tensor(type, {3, 5}, 1));
    tensors.emplace_back(name + ".scalar", random_tensor(type, {}, 2));
    tensors.emplace_back(name + ".empty", random_tensor(type, {4, 0, 2}, 3));
    tensors.emplace_back(name + ".odd", random_tensor(type, {7}, 4));
    tensors.emplace_back(name + ".strided", random_tensor(type, {6, 4}, 5).t().narrow(0, 1, 2));
  }
  const std::string path = folder_.path("all.safetensors");
  write_safetensors(path, tensors, {{"format", "pt"}, {"note", "caf\xc3\xa9 \"quoted\""}});
  const SafetensorsFile file(path);
  EXPECT_EQ(file.names().size(), tensors.size());
  EXPECT_EQ(file.metadata().at("note"), "caf\xc3\xa9 \"quoted\"");
  for (const auto& [name, tensor] : tensors) {
    ASSERT_TRUE(file.contains(name));
    EXPECT_EQ(at::IntArrayRef(file.shape(name)), tensor.sizes()) << name;
    EXPECT_TRUE(same_bits(file.tensor(name), tensor)) << name;
  }
  EXPECT_FALSE(file.contains("none"));
  expect_error([&] { file.tensor("none"); }, {"no tensor \"none\"", "all.safetensors"});
}

TEST_F(Safetensors, WritesAlignedData) {
  write_safetensors(
      folder_.path("a"),
      {{"b", at::ones({3}, at::kByte)}, {"h", at::ones({3}, at::kHalf)}, {"d", at::ones({1}, at::kDouble)}}, {});
  const std::string content = content_of("a");
  uint64_t header = 0;
  std::memcpy(&header, content.data(), sizeof(header));
  EXPECT_EQ(header % 8, 0U);
  EXPECT_NE(content.find(R"("d":{"data_offsets":[0,8],"dtype":"F64","shape":[1]})"), std::string::npos);
  EXPECT_NE(content.find(R"("h":{"data_offsets":[8,14])"), std::string::npos);
  EXPECT_NE(content.find(R"("b":{"data_offsets":[14,17])"), std::string::npos);
  EXPECT_EQ(content.find("__metadata__"), std::string::npos);
  EXPECT_EQ(content.size(), 8 + header + 17);
}

TEST_F(Safetensors, ConvertsWhileWriting) {
  const at::Tensor values = at::tensor({1.0F, 1.0F / 3, 1e-9F, 70000.0F});
  write_safetensors(folder_.path("a"), {{"x", values}}, {}, {at::kBFloat16});
  EXPECT_TRUE(same_bits(SafetensorsFile(folder_.path("a")).tensor("x"), values.to(at::kBFloat16)));
}

TEST_F(Safetensors, GivesTensorsTheirOwnMemory) {
  at::Tensor first;
  at::Tensor second;
  {
    const SafetensorsFile file = open(safetensors_file(header({entry("x", "I32", "[2]", "[0,8]")}) + "  ",
                                                       test::raw_bytes(std::vector<int32_t>{7, -8})));
    first = file.tensor("x");
    second = file.tensor("x");
  }
  std::filesystem::remove(folder_.path("a.safetensors"));
  EXPECT_EQ(first[0].item<int>(), 7);
  EXPECT_EQ(second[1].item<int>(), -8);
}

TEST_F(Safetensors, RefusesATruncatedFile) {
  const SafetensorsFile file = open(safetensors_file(header({entry("x", "I32", "[2]", "[0,8]")}) + "  ",
                                                     test::raw_bytes(std::vector<int32_t>{7, -8})));
  const std::string path = folder_.path("a.safetensors");
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
  EXPECT_EQ(file.type("x"), at::kInt);
  expect_error([&] { file.tensor("x"); }, {"a.safetensors: the file was truncated while it was in use"});
}

TEST_F(Safetensors, ReadsTensorsInAnyPlace) {
  for (size_t padding = 0; padding < 8; ++padding) {
    const std::string head = header({entry("x", "F64", "[2]", "[0,16]")}) + std::string(padding, ' ');
    const SafetensorsFile file = open(safetensors_file(head, test::raw_bytes(std::vector<double>{0.5, -3})));
    const at::Tensor x = file.tensor("x");
    EXPECT_EQ(reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 8, 0U);
    EXPECT_EQ(x[1].item<double>(), -3);
  }
}

TEST_F(Safetensors, ReadsBytesOfBoolAbove1AsTrue) {
  const at::Tensor x =
      open(safetensors_file(header({entry("x", "BOOL", "[4]", "[0,4]")}), {"\0\1\2\xff", 4})).tensor("x");
  EXPECT_EQ(x.scalar_type(), at::kBool);
  EXPECT_TRUE(at::equal(x, at::tensor({0, 1, 1, 1}).to(at::kBool)));
}

TEST_F(Safetensors, RefusesUnknownTypesWhenAskedForThem) {
  const SafetensorsFile file =
      open(safetensors_file(header({entry("x", "F8_E4M3", "[3]", "[0,3]"), entry("y", "U8", "[1]", "[3,4]")}), "abcd"));
  EXPECT_EQ(file.tensor("y").item<uint8_t>(), 'd');
  expect_error([&] { file.tensor("x"); }, {"a.safetensors", "\"x\"", "F8_E4M3", "BF16"});
}

TEST_F(Safetensors, RejectsOtherFiles) {
  expect_error([&] { SafetensorsFile(folder_.path("none")); }, {"none", "cannot open"});
  expect_error([&] { SafetensorsFile(folder_.path("")); }, {"folder"});
  refuse("", {"0 bytes", "empty or truncated"});
  refuse("1234567", {"7 bytes"});
  refuse(std::string(8, '\0'), {"no JSON object"});
  refuse("PK\3\4 this is a zip file", {"header claims"});
  refuse(safetensors_file("[1]", ""), {"no JSON object"});
  refuse(safetensors_file(" {}", ""), {"no JSON object"});  // the format begins with {
}

TEST_F(Safetensors, RefusesWrongHeaderLengths) {
  const std::string head = header({entry("x", "U8", "[4]", "[0,4]")});
  for (const int64_t length : {int64_t{100'000'001}, int64_t{1} << 40, INT64_MAX}) {
    refuse(safetensors_file(head, "abcd", length), {"claims", std::to_string(length), "100000000"});
  }
  std::string all_ones = safetensors_file(head, "abcd");
  std::memset(all_ones.data(), 0xff, 8);
  refuse(all_ones, {"claims 18446744073709551615 bytes"});
  refuse(safetensors_file(head, "abcd", 100'000'000), {"claims 100000000 bytes, but", "truncated"});
  refuse(safetensors_file(head, "abcd", static_cast<int64_t>(head.size()) + 5), {"claims", "truncated"});
  refuse(safetensors_file(head, "abcd", static_cast<int64_t>(head.size()) - 1), {"not JSON"});
  refuse(safetensors_file(head, "abcd", static_cast<int64_t>(head.size()) + 1), {"not JSON"});
}

TEST_F(Safetensors, RefusesBadOffsets) {
  const auto two = [](const std::string& first, const std::string& second) {
    return header({entry("x", "U8", "[4]", first), entry("y", "U8", "[4]", second)});
  };
  EXPECT_NO_THROW(open(safetensors_file(two("[4,8]", "[0,4]"), std::string(8, 'a'))));
  refuse_header(two("[0,4]", "[3,7]"), 8, {"\"y\"", "overlap"});
  refuse_header(two("[0,4]", "[0,4]"), 8, {"overlap"});
  refuse_header(two("[0,4]", "[5,9]"), 9, {"4 to 5", "no tensor"});
  refuse_header(two("[1,5]", "[5,9]"), 9, {"0 to 1", "no tensor"});
  refuse_header(two("[0,4]", "[4,8]"), 9, {"8 to 9", "no tensor"});
  refuse_header(two("[0,4]", "[4,8]"), 7, {"\"y\"", "4 to 8", "has 7", "truncated"});
  refuse_header(two("[0,4]", "[8,4]"), 8, {"\"y\"", "8 and 4"});
  refuse_header(two("[0,4]", "[-4,0]"), 8, {"\"y\"", "data_offsets", "integers from 0"});
  refuse_header(two("[0,4]", "[4.0,8]"), 8, {"integers from 0"});
  refuse_header(two("[0,4]", "[\"4\",8]"), 8, {"integers from 0"});
  refuse_header(two("[0,4]", "[4]"), 8, {"data_offsets are not two"});
  refuse_header(two("[0,4]", "[4,8,8]"), 8, {"data_offsets are not two"});
  refuse_header(two("[0,4]", "4"), 8, {"data_offsets is not a list"});
  refuse_header(two("[0,4]", "[18446744073709551612,0]"), 8, {"integers from 0 to 2^63 - 1"});
  refuse_header(two("[0,4]", "[9223372036854775803,9223372036854775807]"), 8, {"9223372036854775803", "has 8"});
  refuse_header(two("[0,4]", "[4,99999999999999999999999]"), 8, {"integers from 0"});
  refuse_header(header({entry("x", "F8", "[4]", "[5,4]")}), 4, {"5 to 4"});  // the check covers unknown types too
  refuse_header(header({entry("x", "F8", "[4]", "[0,5]")}), 4, {"0 to 5"});
  refuse_header("{}", 4, {"0 to 4", "no tensor"});
  EXPECT_TRUE(open(safetensors_file("{}", "")).names().empty());
}

TEST_F(Safetensors, RefusesShapesThatDoNotFit) {
  const auto one = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return header({entry("x", dtype, shape, offsets)});
  };
  EXPECT_NO_THROW(open(safetensors_file(one("F32", "[2]", "[0,8]"), std::string(8, 'a'))));
  EXPECT_NO_THROW(open(safetensors_file(one("F32", "[]", "[0,4]"), std::string(4, 'a'))));
  EXPECT_NO_THROW(open(safetensors_file(one("F32", "[0,7]", "[0,0]"), "")));
  refuse_header(one("F16", "[2]", "[0,8]"), 8, {"[2] of F16 needs 4 bytes"});  // the wrong dtype
  refuse_header(one("F32", "[3]", "[0,8]"), 8, {"needs 12 bytes"});
  refuse_header(one("F32", "[-2]", "[0,8]"), 8, {"shape", "integers from 0"});
  refuse_header(one("F32", "[2.0]", "[0,8]"), 8, {"shape"});
  refuse_header(one("F32", "2", "[0,8]"), 8, {"shape is not a list"});
  refuse_header(one("F32", "[[2]]", "[0,8]"), 8, {"nested deeper"});
  refuse_header(one("F32", "[true]", "[0,8]"), 8, {"shape", "integers from 0"});
  refuse_header(one("F32", "[4294967296,4294967296]", "[0,0]"), 0, {"64 bits"});    // 2^64 elements
  refuse_header(one("F32", "[4611686018427387904]", "[0,0]"), 0, {"64 bits"});      // 2^62 * 4 wraps to 0
  refuse_header(one("F32", "[0,4294967296,4294967296]", "[0,0]"), 0, {"64 bits"});  // strides would overflow
  refuse_header(one("F32", "[9223372036854775808]", "[0,0]"), 0, {"integers from 0"});
  refuse_header(one("U8", "[9223372036854775807]", "[0,0]"), 0, {"needs 9223372036854775807"});
  std::string many = "[1";
  for (int i = 0; i < 32; ++i) many += ",1";
  refuse_header(one("U8", many + "]", "[0,1]"), 1, {"33 dimensions"});
}

TEST_F(Safetensors, RefusesBadHeaders) {
  const std::string x = entry("x", "U8", "[1]", "[0,1]");
  EXPECT_NO_THROW(open(safetensors_file(header({x, R"("__metadata__":{"a":"b"})"}), "a")));
  refuse_header(header({x, x}), 1, {"\"x\" is there twice"});
  refuse_header(R"({"x":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1, {"\"dtype\"", "twice"});
  refuse_header(R"({"x":{"shape":[1],"data_offsets":[0,1]}})", 1, {"no dtype"});
  refuse_header(R"({"x":{"dtype":"U8","data_offsets":[0,1]}})", 1, {"no shape"});
  refuse_header(R"({"x":{"dtype":"U8","shape":[1]}})", 1, {"no data_offsets"});
  refuse_header(R"({"x":{"dtype":8,"shape":[1],"data_offsets":[0,1]}})", 1, {"dtype is not a text"});
  refuse_header(R"({"x":[1]})", 1, {"\"x\" is not described by an object"});
  refuse_header(header({x, R"("__metadata__":{"a":1})"}), 1, {"\"a\" is not a text"});
  refuse_header(header({x, R"("__metadata__":[])"}), 1, {"__metadata__"});
  refuse_header(header({x}) + " x", 1, {"not JSON"});
  refuse_header(header({x, ""}), 1, {"not JSON"});
  refuse_header("{\"\xff\":" + x.substr(4) + "}", 1, {"not JSON"});
  refuse_header(R"({"\u001b[31m":[1]})", 1, {"\"?[31m\""});  // the terminal gets no control characters
  const std::string deep(1'000'000, '[');
  refuse_header("{\"x\":" + deep, 1, {"nested deeper"});
  refuse_header("{\"" + std::string(1'000'000, 'n') + "\":1}", 1, {"nnn...", "not described"});
}

// Reads every tensor to its end.
int64_t sum_of_bytes(const SafetensorsFile& file) {
  int64_t sum = 0;
  for (const std::string& name : file.names()) {
    const at::Tensor tensor = file.tensor(name).contiguous();
    const auto* bytes = static_cast<const uint8_t*>(tensor.const_data_ptr());
    for (size_t i = 0; i < tensor.nbytes(); ++i) sum += bytes[i];
  }
  return sum;
}

TEST_F(Safetensors, RefusesEveryTruncation) {
  const std::string full = safetensors_file(
      header({entry("w", "F32", "[2,1]", "[0,8]"), entry("b", "BOOL", "[3]", "[8,11]")}), std::string(11, '\1'));
  ASSERT_NO_THROW(sum_of_bytes(open(full)));
  for (size_t size = 0; size < full.size(); ++size) {
    SCOPED_TRACE(size);
    refuse(full.substr(0, size), {});
  }
  refuse(full + '\0', {"no tensor"});
}

TEST_F(Safetensors, SurvivesEveryFlippedBit) {
  const std::string whole =
      safetensors_file(header({entry("w", "F32", "[2,1]", "[0,8]"), entry("b", "BOOL", "[3]", "[8,11]"),
                               entry("h", "BF16", "[1]", "[11,13]"), R"("__metadata__":{"format":"pt"})"}),
                       std::string(13, '\1'));
  EXPECT_EQ(sum_of_bytes(open(whole)), 13);
  int accepted = 0;
  int refused = 0;
  for (size_t bit = 0; bit < whole.size() * 8; ++bit) {
    std::string content = whole;
    content[bit / 8] = static_cast<char>(content[bit / 8] ^ (1 << bit % 8));
    try {
      sum_of_bytes(open(content));
      ++accepted;
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(accepted, 13 * 8);  // the data may have any value, and so may a name
  EXPECT_GT(refused, 1000);
}

TEST_F(Safetensors, SurvivesRandomDamage) {
  const std::string whole = safetensors_file(
      header({entry("w", "F32", "[2,1]", "[0,8]"), entry("b", "I16", "[3]", "[8,14]")}), std::string(14, '\1'));
  std::mt19937 random(7);
  int accepted = 0;
  int refused = 0;
  for (int round = 0; round < 4000; ++round) {
    std::string content = whole;
    const auto changes = 1 + random() % 3;
    for (size_t i = 0; i < changes; ++i) {
      const size_t at = round % 8 == 0 ? random() % content.size() : 8 + random() % (content.size() - 8);
      content[at] = round % 2 == 0 ? static_cast<char>(random()) : "0123456789[]{},:\"FIU-."[random() % 22];
    }
    if (round % 5 == 0) content.resize(random() % (content.size() + 1));
    try {
      sum_of_bytes(open(content));
      ++accepted;
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(accepted, 20);
  EXPECT_GT(refused, 1000);
}

TEST_F(Safetensors, RejectsTensorsThatCannotBeReadBack) {
  const at::Tensor x = at::ones({2});
  const std::string path = folder_.path("out");
  expect_error([&] { write_safetensors(path, {{"x", x}, {"x", x}}, {}); }, {"out", "two tensors", "x"});
  expect_error([&] { write_safetensors(path, {{"__metadata__", x}}, {}); }, {"__metadata__"});
  expect_error([&] { write_safetensors(path, {{"x", x.to(at::kComplexFloat)}}, {}); }, {"x", "ComplexFloat", "F32"});
  expect_error([&] { write_safetensors(path, {{"\xff", x}}, {}); }, {"out", "UTF-8"});
  expect_error([&] { write_safetensors(folder_.path("no/out"), {{"x", x}}, {}); }, {"no/out", "No such file"});
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path("")));  // no temporary file is left
}

TEST_F(Safetensors, KeepsTheOldFileWhenAWriteFails) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full here";
  const std::string path = folder_.write("out", "old");
  std::filesystem::create_symlink("/dev/full", path + ".new");
  expect_error([&] { write_safetensors(path, {{"x", at::ones({2})}}, {}); }, {"out.new", "No space left"});
  EXPECT_EQ(content_of("out"), "old");
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
