// Tests that whole files are read up to their limit and replaced when written, and the errors.
#include <filesystem>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/expect_error.h"
#include "twobp/core/check.h"
#include "twobp/core/text.h"

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

// Opening a pipe for reading would wait for a writer that never comes.
TEST(TextFile, RefusesWhatIsNoFile) {
  const std::string path = ::testing::TempDir() + "twobp_pipe";
  std::filesystem::remove(path);
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  expect_error([&] { read_text(path, 5); }, {path, "pipe"});
  std::filesystem::remove(path);
  std::filesystem::create_symlink(path, path);  // to itself
  expect_error([&] { read_text(path, 5); }, {"cannot read", path, "symbolic links"});
  std::filesystem::remove(path);
  expect_error([&] { read_text("/dev/zero", 5); }, {"/dev/zero", "longer than the 5 bytes"});
}

// As <(...) of a shell gives them.
TEST(TextFile, ReadsStreamsOfThisProgram) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  ASSERT_EQ(::write(ends[1], "12345", 5), 5);
  ::close(ends[1]);
  EXPECT_EQ(read_text(concat("/dev/fd/", ends[0]), 5), "12345");
  ::close(ends[0]);
}

// A file without blocks is refused before memory is taken for it.
TEST(TextFile, RefusesASparseGiant) {
  const std::string path = ::testing::TempDir() + "twobp_sparse";
  write_text(path, "");
  std::filesystem::resize_file(path, uint64_t{40} << 30U);
  expect_error([&] { read_text(path, uint64_t{1} << 30U); }, {path, "longer than the 1073741824 bytes"});
  std::filesystem::remove(path);
}

TEST(TextFile, NamesTheFileItCannotWrite) {
  const std::string path = ::testing::TempDir() + "no/such/folder/trace.json";
  expect_error([&] { write_text(path, "[]"); }, {path, "No such file"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
