// Tests a new folder: if the work in it fails, it is removed with the parents that were made for it, and no
// others.
#include <gtest/gtest.h>

#include "tests/train/helpers.h"
#include "twobp/files/new_file.h"

namespace twobp::TWOBP_FILE {
namespace {

namespace fs = std::filesystem;

TEST(NewFolder, IsRemovedUnlessKept) {
  const test::TempFolder folder;
  fs::create_directory(folder.path("old"));
  const std::string deep = folder.path("old/new/deep");
  for (const std::string& path : {deep, deep + "/"}) {
    {
      const NewFolder made(path);
      EXPECT_TRUE(fs::is_directory(deep));
    }
    EXPECT_FALSE(fs::exists(folder.path("old/new"))) << path;
    EXPECT_TRUE(fs::exists(folder.path("old")));
  }
  {
    const NewFolder outer(folder.path("old/new"));
    const NewFolder made(deep);
    folder.write("old/new/file", "mine");
  }
  EXPECT_FALSE(fs::exists(deep));
  EXPECT_TRUE(fs::exists(folder.path("old/new/file")));
  NewFolder(deep).keep();
  { const NewFolder again(deep); }
  EXPECT_TRUE(fs::exists(deep)) << "it was there before";
}

TEST(NewFolder, ReportsThatItCannotBeMade) {
  const test::TempFolder folder;
  const std::string file = folder.write("file", "mine");
  for (const std::string& path : {file, file + "/deeper"}) {
    test::expect_error([&] { NewFolder{path}; }, {"cannot create the folder", path});
  }
  EXPECT_EQ(test::read_file(file), "mine");
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
