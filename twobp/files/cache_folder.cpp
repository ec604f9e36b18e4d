#include "twobp/files/cache_folder.h"

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <system_error>
#include <thread>
#include <unistd.h>

#include "twobp/core/check.h"
#include "twobp/core/measure.h"

namespace twobp {
namespace {

namespace fs = std::filesystem;

constexpr double kLockedFor = 86400;  // in seconds, because tokenizing may take long

}  // namespace

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
