// POSIX glob, without its order, because that depends on the locale.
#include "twobp/files/glob.h"

#include <algorithm>
#include <glob.h>
#include <sys/stat.h>

#include "twobp/core/check.h"

namespace twobp {
namespace {

bool is_folder(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

bool exists(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0;
}

std::vector<std::string> matches(const std::string& pattern, std::string_view key) {
  if (exists(pattern)) return {pattern};  // a plain name, even one that contains [ or *
  glob_t found{};
  const int status = ::glob(pattern.c_str(), GLOB_NOSORT | GLOB_TILDE, nullptr, &found);
  std::vector<std::string> paths(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  ::globfree(&found);
  TWOBP_CHECK(status == 0 || status == GLOB_NOMATCH, key, ": cannot search for \"", pattern,
              "\": a folder on the way cannot be read.");
  std::sort(paths.begin(), paths.end());
  return paths;
}

}  // namespace

std::vector<std::string> matching_files(const std::string& pattern, std::string_view key, std::string_view extension) {
  std::vector<std::string> paths = matches(pattern, key);
  TWOBP_CHECK(!paths.empty(), key, ": no file matches \"", pattern,
              "\": check the path, which is relative to the folder the program runs in.");
  const size_t found = paths.size();
  std::erase_if(paths, is_folder);
  TWOBP_CHECK(!paths.empty(), key, ": \"", pattern, "\" matches ", found == 1 ? "a folder" : "only folders",
              ": name the files in it, for instance \"", pattern, "/*", extension, "\".");
  return paths;
}

}  // namespace twobp
