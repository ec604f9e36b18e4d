#include "twobp/core/text_file.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <optional>
#include <sys/stat.h>
#include <unistd.h>

#include "twobp/core/check.h"

namespace twobp {

namespace {

// Closes the file in any case.
class OpenFile {
 public:
  // Without O_NONBLOCK, opening a named pipe would wait for a writer.
  explicit OpenFile(const std::string& path)
      : path_(path), fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
    check(fd_ >= 0);
  }
  ~OpenFile() {
    if (fd_ >= 0) ::close(fd_);
  }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  // The size of a regular file. None for a stream that this program was given: /dev/stdin, or <(...) of a shell, which
  // is /dev/fd/N. Throws Error for anything else: it may never end, or never begin.
  std::optional<uint64_t> size() const {
    struct stat status {};
    check(::fstat(fd_, &status) == 0);
    if (S_ISREG(status.st_mode)) return static_cast<uint64_t>(status.st_size);
    TWOBP_CHECK(!S_ISDIR(status.st_mode), path_, ": is a folder, not a file");
    TWOBP_CHECK(path_.starts_with("/dev/"), path_, ": is a pipe, a socket or a device, not a file");
    check(::fcntl(fd_, F_SETFL, ::fcntl(fd_, F_GETFL) & ~O_NONBLOCK) == 0);
    return std::nullopt;
  }
  // 0 at the end.
  size_t read(char* to, size_t most) const {
    while (true) {
      const ssize_t got = ::read(fd_, to, most);
      if (got < 0 && errno == EINTR) continue;
      check(got >= 0);
      return static_cast<size_t>(got);
    }
  }

 private:
  void check(bool ok) const { TWOBP_CHECK(ok, "cannot read ", path_, ": ", std::strerror(errno)); }

  const std::string& path_;
  int fd_;
};

}  // namespace

std::string read_text(const std::string& path, uint64_t max_bytes) {
  const OpenFile file(path);
  const std::optional<uint64_t> size = file.size();
  const auto check_length = [&](uint64_t bytes) {
    TWOBP_CHECK(bytes <= max_bytes, path, ": longer than the ", max_bytes, " bytes that such a file may have");
  };
  if (size) check_length(*size);
  constexpr size_t kBlock = size_t{1} << 20U;
  std::string text;
  while (true) {  // a file may be endless, or may not know its size
    const size_t begin = text.size();
    text.resize(begin + kBlock);
    const size_t got = file.read(text.data() + begin, kBlock);
    text.resize(begin + got);
    check_length(text.size());
    if (got == 0) return text;
  }
}

void write_text(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.flush();
  TWOBP_CHECK(file.good(), "cannot write ", path, ": ", std::strerror(errno));
}

}  // namespace twobp
