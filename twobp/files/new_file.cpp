// POSIX open, write, fsync, rename.
#include "twobp/files/new_file.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <system_error>
#include <unistd.h>
#include <utility>

#include "twobp/core/check.h"

namespace twobp {

NewFile::NewFile(std::filesystem::path path) : path_(std::move(path)), aside_(path_.string() + ".new") {
  std::error_code missing;
  TWOBP_CHECK(!std::filesystem::is_directory(path_, missing), "cannot write ", path_.string(),
              ": a folder of that name is in the way");
  fd_ = ::open(aside_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  check(fd_ >= 0, "create");
}

NewFile::~NewFile() {
  if (fd_ >= 0) ::close(fd_);
  if (!committed_) ::unlink(aside_.c_str());
}

void NewFile::write(const void* data, size_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(fd_, at, bytes);
    if (written < 0 && errno == EINTR) continue;
    check(written > 0, "write");
    at += written;
    bytes -= static_cast<size_t>(written);
  }
}

void NewFile::finish() {
  if (fd_ < 0) return;
  check(::fsync(fd_) == 0, "sync");
  check(::close(std::exchange(fd_, -1)) == 0, "close");
}

void NewFile::commit() {
  finish();
  check(::rename(aside_.c_str(), path_.c_str()) == 0, "rename");
  committed_ = true;
  sync_folder(std::filesystem::absolute(path_).parent_path());
}

void NewFile::check(bool ok, const char* what) const {
  TWOBP_CHECK(ok, "cannot ", what, " ", aside_.string(), ": ", std::strerror(errno));
}

void sync_folder(const std::filesystem::path& folder) {
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool synced = fd >= 0 && (::fsync(fd) == 0 || errno == EINVAL);  // some files cannot be synced
  const int error = errno;
  if (fd >= 0) ::close(fd);
  TWOBP_CHECK(synced, "cannot sync the folder ", folder.string(), ": ", std::strerror(error));
}

NewFolder::NewFolder(const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::path at = std::filesystem::absolute(path, error).lexically_normal();
  if (at.filename().empty()) at = at.parent_path();  // "folder/"
  for (; !std::filesystem::exists(at, error) && at.has_relative_path(); at = at.parent_path()) {
    made_.push_back(at);
  }
  error.clear();
  std::filesystem::create_directories(path, error);
  if (!error) return;
  const std::string reason = error.message();
  for (const auto& folder : made_) std::filesystem::remove(folder, error);
  fail("cannot create the folder ", path.string(), ": ", reason);
}

NewFolder::~NewFolder() {
  std::error_code error;
  for (const auto& folder : made_) {
    if (!std::filesystem::is_directory(folder, error) || !std::filesystem::remove(folder, error)) return;
  }
}

}  // namespace twobp
