// POSIX open, fstat, pread.
#include "twobp/files/input_file.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <utility>

#include "twobp/core/check.h"

namespace twobp {
namespace {

constexpr size_t kMostAtOnce = size_t{1} << 30;  // Linux reads at most 2 GiB at once

std::string open_error(int error) {
  std::string text = std::generic_category().message(error);
  if (error == EMFILE) text += ": join small files into larger ones, or raise the limit (ulimit -n)";
  return text;
}

}  // namespace

InputFile::InputFile(std::string path) : path_(std::move(path)) {
  // Without O_NONBLOCK, opening a named pipe would wait for a writer.
  fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  TWOBP_CHECK(fd_ >= 0, path_, ": cannot open: ", open_error(errno), ".");
  try {
    struct stat status {};
    TWOBP_CHECK(::fstat(fd_, &status) == 0, path_, ": cannot read its size: ", std::generic_category().message(errno),
                ".");
    TWOBP_CHECK(S_ISREG(status.st_mode), path_, ": is not a file",
                S_ISDIR(status.st_mode) ? " but a folder." : " of fixed size: copy its content into one.");
    size_ = static_cast<size_t>(status.st_size);
  } catch (...) {
    ::close(fd_);
    throw;
  }
}

InputFile::~InputFile() {
  if (fd_ >= 0) ::close(fd_);
}

InputFile::InputFile(InputFile&& other) noexcept
    : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)), size_(std::exchange(other.size_, 0)) {}

InputFile& InputFile::operator=(InputFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(fd_, other.fd_);
  std::swap(size_, other.size_);
  return *this;
}

void InputFile::read(size_t offset, void* to, size_t count) const {
  TWOBP_CHECK(offset <= size_ && count <= size_ - offset, path_, ": bytes ", offset, " to ", offset + count,
              " are outside the file, which has ", size_, ".");
  auto* next = static_cast<char*>(to);
  for (size_t done = 0; done < count;) {
    const ssize_t got =
        ::pread(fd_, next + done, std::min(count - done, kMostAtOnce), static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    TWOBP_CHECK(got >= 0, path_, ": cannot read: ", std::generic_category().message(errno), ".");
    TWOBP_CHECK(got > 0, path_, ": the file was truncated while it was in use: it had ", size_,
                " bytes and now ends before byte ", offset + done + 1,
                ": restore it, and give changed data a new file name.");
    done += static_cast<size_t>(got);
  }
}

std::vector<uint8_t> read_whole_file(const std::string& path) {
  const InputFile file(path);
  std::vector<uint8_t> bytes(file.size());
  file.read(0, bytes.data(), bytes.size());
  return bytes;
}

}  // namespace twobp
