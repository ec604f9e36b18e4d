// POSIX glob, without its order, because that depends on the locale.
#include "twobp/files/paths.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <glob.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <system_error>
#include <thread>
#include <unistd.h>

#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/core/text.h"

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

namespace fs = std::filesystem;

constexpr double kLockedFor = 86400;  // in seconds, because tokenizing may take long

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

std::string hub_hint(const std::string& path) {
  // "org/name", or "name" of an old model, such as gpt2.
  static const Pattern hub_name("([A-Za-z0-9][A-Za-z0-9._-]*/)?[A-Za-z0-9][A-Za-z0-9._-]*");
  std::error_code missing;
  if (hub_name.match(path).empty() || std::filesystem::exists(path, missing)) return "";
  return concat(" (if ", path, " is a name on the Hugging Face Hub, download it first: hf download ", path,
                " --local-dir ", path, ")");
}

std::string lower_extension(const std::filesystem::path& path) {
  std::string extension = path.extension().string();
  std::transform(extension.begin(), extension.end(), extension.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return extension;
}

fs::path cache_folder(const std::string& configured, const char* what) {
  if (!configured.empty()) return configured;
  const char* cache = std::getenv("XDG_CACHE_HOME");
  if (cache != nullptr && *cache != '\0') return fs::path(cache) / "twobp";
  const char* home = std::getenv("HOME");
  TWOBP_CHECK(home != nullptr && *home != '\0', "cannot keep ", what,
              ": neither $XDG_CACHE_HOME nor $HOME is set: set data.cache to a folder.");
  return fs::path(home) / ".cache" / "twobp";
}

LockedFolder::LockedFolder(const fs::path& folder, const char* what) {
  std::error_code error;
  fs::create_directories(folder, error);
  fd_ = ::open((folder / "lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  TWOBP_CHECK(fd_ >= 0, "cannot keep ", what, ": ", folder.string(), ": ",
              error ? error.message() : std::generic_category().message(errno),
              ": set data.cache to a folder that can be written.");
  // Some file systems have no locks. Then two runs may do the same work, which is harmless.
  const double begin = awake_seconds();
  while (::flock(fd_, LOCK_EX | LOCK_NB) != 0 && (errno == EWOULDBLOCK || errno == EINTR)) {
    TWOBP_CHECK(awake_seconds() - begin < kLockedFor, folder.string(), ": another run has been making ", what,
                " there for a day: it is stuck, or stopped.");
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

LockedFolder::~LockedFolder() {
  ::close(fd_);
}

std::string state_of_file(const fs::path& file) {
  struct stat status {};
  TWOBP_CHECK(::stat(file.c_str(), &status) == 0, file.string(),
              ": cannot open: ", std::generic_category().message(errno), ".");
  const auto nanoseconds = [](const timespec& time) { return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec; };
  return concat(status.st_size, ' ', status.st_ino, ' ', nanoseconds(status.st_mtim), ' ', nanoseconds(status.st_ctim));
}

}  // namespace twobp
