// Tests that whole files are read up to their limit and replaced when written, and the errors.
#include "twobp/core/text_file.h"

#include <filesystem>

#include "tests/expect_error.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_error;

TEST(TextFile, ReadsFilesUpToTheirLimit) {
  const std::string path = ::testing::TempDir() + "twobp_text_file";
  write_text(path, "123456");
  write_text(path, "12345");
  EXPECT_EQ(read_text(path, 5), "12345");
  expect_error([&] { read_text(path, 4); }, {path, "longer than the 4 bytes"});
  std::filesystem::remove(path);
  expect_error([&] { read_text(path, 5); }, {"cannot read", path});
  expect_error([] { read_text(::testing::TempDir(), 5); }, {"folder"});
}

TEST(TextFile, NamesTheFileItCannotWrite) {
  const std::string path = ::testing::TempDir() + "no/such/folder/trace.json";
  expect_error([&] { write_text(path, "[]"); }, {path, "No such file"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
