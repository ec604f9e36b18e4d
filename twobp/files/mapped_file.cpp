// POSIX open, fstat, mmap.
#include "twobp/files/mapped_file.h"

#include <cerrno>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <utility>

#include "twobp/core/check.h"

#if defined(__SANITIZE_ADDRESS__)
#define TWOBP_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TWOBP_ASAN 1
#endif
#endif
#if defined(TWOBP_ASAN)
#include <sanitizer/asan_interface.h>
#endif

namespace twobp {
namespace {

// The rest of the last page is mapped too. It is poisoned, so that AddressSanitizer detects reads there.
void forbid_end([[maybe_unused]] const uint8_t* data, [[maybe_unused]] size_t size,
                [[maybe_unused]] bool forbid) {
#if defined(TWOBP_ASAN)
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t rest = (page - size % page) % page;
  if (forbid) __asan_poison_memory_region(data + size, rest);
  if (!forbid) __asan_unpoison_memory_region(data + size, rest);
#endif
}

std::string reason(int error) {
  return std::generic_category().message(error);
}

struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

}  // namespace

MappedFile::MappedFile(std::string path) : path_(std::move(path)) {
  // Without O_NONBLOCK, opening a named pipe would wait for a writer.
  const Descriptor file{::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  TWOBP_CHECK(file.fd >= 0, path_, ": cannot open: ", reason(errno), ".");
  struct stat status {};
  TWOBP_CHECK(::fstat(file.fd, &status) == 0, path_, ": cannot read its size: ", reason(errno), ".");
  TWOBP_CHECK(S_ISREG(status.st_mode), path_, ": is not a file",
              S_ISDIR(status.st_mode) ? " but a folder." : " that can be mapped: copy its content into one.");
  size_ = static_cast<size_t>(status.st_size);
  if (size_ == 0) return;
  void* mapped = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.fd, 0);
  if (mapped == MAP_FAILED) fail(path_, ": cannot map ", size_, " bytes: ", reason(errno), ".");
  data_ = static_cast<const uint8_t*>(mapped);
  forbid_end(data_, size_, true);
}

MappedFile::~MappedFile() {
  unmap();
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  if (this == &other) return *this;
  unmap();
  path_ = std::move(other.path_);
  data_ = std::exchange(other.data_, nullptr);
  size_ = std::exchange(other.size_, 0);
  return *this;
}

void MappedFile::unmap() noexcept {
  if (data_ == nullptr) return;
  forbid_end(data_, size_, false);
  ::munmap(const_cast<uint8_t*>(data_), size_);
}

}  // namespace twobp
